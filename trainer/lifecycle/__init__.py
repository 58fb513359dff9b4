"""The life of a run: its folder and owner, how it resumes, stops, fails and ends, and its self-checks and watchdog."""

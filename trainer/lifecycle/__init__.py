"""The life of a run: its folder and owner, the checks before its first step, how it resumes, stops, fails and ends."""

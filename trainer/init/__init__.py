"""The command `meshtrainer init`, and the files of the project that it writes."""

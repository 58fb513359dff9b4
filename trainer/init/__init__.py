"""The command `meshtrainer init`, and the template of the project that it creates."""

"""The recipes' configuration files: only what differs from the defaults; the first line says what each is for."""

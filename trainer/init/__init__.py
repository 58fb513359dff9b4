"""The command `meshtrainer init`, and the template for the projects that it creates."""

"""The project's package. Files are yours, folders are the machine."""

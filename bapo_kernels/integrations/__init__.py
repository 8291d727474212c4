"""In the trainers people use: a module for each, imported by those who use that trainer."""

"""Compiling a program for a target that is not here, in a child process."""

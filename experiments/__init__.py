"""One file, one question: each docstring opens with the question, the command and the expected result."""

"""`python -m jaxmem VERB`, the same as `jaxmem VERB`."""

from jaxmem.cli.main import entry

if __name__ == "__main__":
    entry()

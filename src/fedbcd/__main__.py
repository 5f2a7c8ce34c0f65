"""`python -m fedbcd`: the command line, where the script is not on the path."""

from fedbcd.cli import main

if __name__ == "__main__":
    main()

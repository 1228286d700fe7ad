"""`python -m jackfield`: the same as the command `jackfield`."""

from jackfield.cli import main

if __name__ == "__main__":
    main()

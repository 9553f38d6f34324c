"""`python -m electra` is the command `electra`; torchrun starts it this way."""

from electra.cli import main

if __name__ == "__main__":
    main()

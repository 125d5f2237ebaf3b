"""`python -m hvdtrain.cli`."""

from hvdtrain.cli import main

if __name__ == "__main__":
    main()

"""`python -m narrowcast`."""

from narrowcast.cli import main

if __name__ == "__main__":
    main()

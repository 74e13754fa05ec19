"""`python -m services.cli`: what the launcher `./baton` calls."""

from services.cli.main import main

if __name__ == "__main__":
    main()

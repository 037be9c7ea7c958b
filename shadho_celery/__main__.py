"""The command line: ``python -m shadho_celery``, the same as ``shadho-celery``."""

from shadho_celery.cli.main import main

if __name__ == "__main__":
    main()

"""Data sets of the Hugging Face hub, with an error that says what to do where there is no hub."""

from env import DataError


def download(name, split, config=None):
    """-> the data set. DataError where it cannot be had."""
    try:
        from datasets import load_dataset

        return load_dataset(name, config, split=split)
    except Exception as e:  # no package, no network, no such host: a dozen types
        raise DataError(
            f"cannot load {name}: {type(e).__name__}: {e}. Run `pip install datasets` where there is a network, or "
            "name a JSON Lines file with the same columns: env.args.path=FILE"
        ) from e

"""Downloads data sets from the Hugging Face hub, with an error that says what to do without network access."""

from env import DataError


def download(name, split, config=None):
    """Returns the data set; raises DataError if it cannot be loaded."""
    try:
        from datasets import load_dataset

        return load_dataset(name, config, split=split)
    except Exception as e:  # no package, no network, no such host: a dozen types
        raise DataError(
            f"cannot load {name}: {type(e).__name__}: {e}. Run `pip install datasets` and make sure that there is a "
            "network, or name a JSON Lines file with the same columns: env.args.path=FILE"
        ) from e

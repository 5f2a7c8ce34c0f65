"""The files of a run folder, which `record.runfolder` lists with what is in them."""

LOG = "events.jsonl"
JOB = "config.toml"
DEPLOY = "deploy.toml"
CHECKPOINT = "checkpoint.safetensors"
MODELS = "models.safetensors"
HISTORY = "history.csv"
REPORT = "report.html"
SERIES = ("comparison.csv", "sweep.csv")  # of runs with several seeds: means over these
FAILURE = "failure.txt"  # of a run that could not go on: why, in a sentence
DEVICES = "devices.csv"  # at the end; during the run, of a round: `devices_file`


def devices_file(round_: int) -> str:
    """The table of devices as it was after some round."""
    return f"devices-{round_}.csv"

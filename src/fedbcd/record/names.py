"""The files of a run folder, which `record.runfolder` lists with what is in them."""

LOG = "events.jsonl"
JOB = "config.toml"
DEPLOY = "deploy.toml"
CHECKPOINT = "checkpoint.safetensors"
MODELS = "models.safetensors"
HISTORY = "history.csv"
REPORT = "report.html"

"""Where a run's metrics go besides its own files: TensorBoard, Weights & Biases. One process a sink, one JSON request a line:

    {"op": "open", "sink": "tensorboard" | "wandb", "folder": DIR, "run_name": NAME, "config": YAML}  -> {}
    {"op": "log", "step": 3, "metrics": {NAME: number or null, ...}}                                  -> {}
    {"op": "close"}                                                                                   -> {}, and it ends

A request that fails is answered {"error": message}. The trainer then goes on without this sink.
"""

import json
import os
import sys

from longstraw.worker import end_with, first_line, private_streams


class TensorBoard:
    def __init__(self, folder, run_name, config):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RuntimeError(f"{sys.executable} can't import it ({error}); pip install tensorboard") from error
        # A resumed run adds a file; TensorBoard reads all files of a folder as one run.
        self.writer = SummaryWriter(os.path.join(folder, "tensorboard"))
        self.writer.add_text("config", f"```\n{config}\n```")

    def log(self, step, metrics):
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self):
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, folder, run_name, config):
        try:
            import wandb
        except ImportError as error:
            raise RuntimeError(f"{sys.executable} can't import it ({error}); pip install wandb") from error
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "longstraw"), name=run_name, dir=folder, config={"yaml": config}, resume="allow"
        )

    def log(self, step, metrics):
        self.run.log(metrics, step=step)

    def close(self):
        self.run.finish()


SINKS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def main():
    requests, answers = private_streams()
    end_with(os.getppid())
    sink = None
    for line in requests:
        request = json.loads(line)
        answer = {}
        try:
            if request["op"] == "open":
                sink = SINKS[request["sink"]](request["folder"], request["run_name"], request["config"])
            elif request["op"] == "log":
                sink.log(request["step"], {name: value for name, value in request["metrics"].items() if value is not None})
            elif sink is not None:
                sink.close()
        except Exception as error:  # whatever a library raises: the trainer says it and goes on
            answer = {"error": first_line(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if request["op"] == "close":
            break


if __name__ == "__main__":
    main()

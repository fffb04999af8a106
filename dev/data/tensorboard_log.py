#!/usr/bin/env python3
"""metrics.jsonl as TensorBoard's event files, in the run's folder.

    scripts/setup.sh tensorboard                                # installs it into .venv
    python3 dev/data/tensorboard_log.py runs/mine runs/other    # writes runs/mine/tensorboard/events...
    python3 dev/data/tensorboard_log.py runs/mine --follow      # and goes on while the run does; Ctrl-C ends
    .venv/bin/tensorboard --logdir runs

Each time the files are written from the beginning, in the place of those before. The writer is TensorBoard's
own. metrics.jsonl has no dates: the last step that is there counts as done when the file was last written,
and those before it as far back as they took.
"""
import argparse
import glob
import math
import os
import sys
import time

from plot_log import fail, number, read_metrics, take_the_venv

# key of metrics.jsonl: where TensorBoard shows it; other keys (but for step) are shown by their own names
TAGS = {"loss": "loss/train", "val_loss": "loss/validation", "eval_acc_norm": "eval/acc_norm",
        "eval_acc": "eval/acc", "eval_loss": "eval/loss", "tokens_per_s": "speed/tokens_per_s",
        "ms": "speed/ms", "lr": "train/lr", "norm": "train/norm", "tokens": "train/tokens",
        "gpu_mhz": "gpu/mhz", "gpu_watts": "gpu/watts", "gpu_celsius": "gpu/celsius", "gpu_gib": "gpu/gib"}
POLL_S = 2.0


def import_writer():
    """(EventFileWriter, Event, Summary)"""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        take_the_venv()
        fail("no event files without tensorboard", "scripts/setup.sh tensorboard installs it into .venv")
    return EventFileWriter, Event, Summary


class Follower:
    """What has been written of one run's metrics.jsonl."""

    def __init__(self, run, library):
        self.path, self.folder = os.path.join(run, "metrics.jsonl"), os.path.join(run, "tensorboard")
        self.library, self.writer = library, None
        self.records = []
        if not os.path.isfile(self.path):
            fail(f"there is no {self.path}", "give the folder that -o named")

    def advance(self):
        """Writes what has come. A run that went back to a checkpoint has other lines than before: then all
        is written anew."""
        records = read_metrics(self.path)
        if self.writer is None or records[:len(self.records)] != self.records:
            self.begin()
        new = records[len(self.records):]
        at = os.stat(self.path).st_mtime - sum(number(r.get("ms", 0)) for r in new) * 1e-3
        for record in new:
            at += number(record.get("ms", 0)) * 1e-3
            self.write(record, at)
        self.records = records
        self.writer.flush()

    def begin(self):
        self.close()
        os.makedirs(self.folder, exist_ok=True)
        for old in glob.glob(os.path.join(glob.escape(self.folder), "events.out.tfevents.*")):
            os.remove(old)
        self.writer, self.records = self.library[0](self.folder), []

    def write(self, record, at):
        _, Event, Summary = self.library
        values = [Summary.Value(tag=TAGS.get(key, key), simple_value=number(x)) for key, x in record.items()
                  if key != "step" and (x is None or isinstance(x, (int, float)))]
        self.writer.add_event(Event(wall_time=at if math.isfinite(at) else time.time(), step=record["step"],
                                    summary=Summary(value=values)))

    def close(self):
        if self.writer:
            self.writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--follow", action="store_true", help="go on while the runs do; Ctrl-C ends")
    args = parser.parse_args()
    library = import_writer()
    followers = [Follower(run, library) for run in args.runs]
    try:
        while True:
            for follower in followers:
                started = follower.writer is not None
                follower.advance()
                if not started:
                    print(f"wrote {follower.folder}: {len(follower.records)} records", flush=True)
            if not args.follow:
                break
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        pass
    except OSError as e:
        fail(f"cannot write the event files: {e.filename}: {e.strerror}")
    for follower in followers:
        follower.close()


if __name__ == "__main__":
    sys.exit(main())

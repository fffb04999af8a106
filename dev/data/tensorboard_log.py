#!/usr/bin/env python3
"""metrics.jsonl as TensorBoard's event files, in the run's folder.

    scripts/setup.sh tensorboard                                # installs it into .venv
    python3 dev/data/tensorboard_log.py runs/mine runs/other    # writes runs/mine/tensorboard/events...
    python3 dev/data/tensorboard_log.py runs/mine --follow      # and goes on while the run does; Ctrl-C ends
    .venv/bin/tensorboard --logdir runs

Each time the files are written from the beginning, in the place of those before. metrics.jsonl has no dates:
the last step that is there counts as done when the file was last written, and those before it as far back as
they took.
"""
import argparse
import glob
import math
import os
import sys
import time

from plot_log import fail, guard_terminals, number, read_metrics, take_the_venv

# key of metrics.jsonl: where TensorBoard shows it; other keys (but for step) are shown by their own names;
# losses of a mixture's sources, "val_losses", beside that of all
TAGS = {"loss": "loss/train", "val_loss": "loss/validation", "eval_acc_norm": "eval/acc_norm",
        "eval_acc": "eval/acc", "eval_loss": "eval/loss", "eval_word_ppl": "eval/word_ppl",
        "tokens_per_s": "speed/tokens_per_s", "ms": "speed/ms", "lr": "train/lr", "norm": "train/norm",
        "tokens": "train/tokens", "gpu_mhz": "gpu/mhz", "gpu_watts": "gpu/watts",
        "gpu_celsius": "gpu/celsius", "gpu_gib": "gpu/gib"}
POLL_S = 2.0


def import_writer():
    try:
        from tensorboard.summary import Writer
    except ImportError:
        take_the_venv()
        fail("no event files without tensorboard", "scripts/setup.sh tensorboard installs it into .venv")
    return Writer


def advance(run, new_writer, writer, written):
    """Writes what has come since `written`; returns its writer and all records. A run that went back to a
    checkpoint has other records than before: then all is written anew."""
    path, folder = os.path.join(run, "metrics.jsonl"), os.path.join(run, "tensorboard")
    records = read_metrics(path, must_be=True)
    if writer is None or records[:len(written)] != written:
        if writer:
            writer.close()
        if os.path.islink(folder) or os.path.exists(folder) and not os.path.isdir(folder):
            fail(f"cannot write the event files: '{folder}' is there, and no folder", "remove it")
        for old in glob.glob(os.path.join(glob.escape(folder), "events.out.tfevents.*")):
            os.unlink(old)
        writer, written = new_writer(folder), []
    new = records[len(written):]
    at = os.stat(path).st_mtime - sum(number(record.get("ms", 0)) for record in new) * 1e-3
    for record in new:
        at += number(record.get("ms", 0)) * 1e-3
        sources = {f"{TAGS['val_loss']}/{name}": loss for name, loss in record.get("val_losses", {}).items()}
        for key, x in {**record, **sources}.items():
            if key != "step" and (x is None or isinstance(x, (int, float))):
                writer.add_scalar(TAGS.get(key, key), number(x), record["step"],
                                  wall_time=at if math.isfinite(at) else time.time())
    writer.flush()
    return writer, records


def main():
    guard_terminals()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--follow", action="store_true", help="go on while the runs do; Ctrl-C ends")
    args = parser.parse_args()
    new_writer, written = import_writer(), {run: (None, []) for run in args.runs}
    try:
        while True:
            for run, (writer, before) in written.items():
                written[run] = advance(run, new_writer, writer, before)
                if writer is None:
                    print(f"wrote {run}/tensorboard: {len(written[run][1])} records", flush=True)
            if not args.follow:
                break
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        pass
    except OSError as e:
        fail(f"cannot write the event files: {e.filename}: {e.strerror}")
    for writer, _ in written.values():
        writer.close()


if __name__ == "__main__":
    sys.exit(main())

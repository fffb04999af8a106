"""Pictures and TensorBoard's event files of runs: dev/data/plot_log.py and tensorboard_log.py.

    pytest dev/test/test_plots.py -k tensorboard
"""
import json
import math
import os
import shutil
import subprocess
import sys

import pytest

from checks import ROOT
from trainer import assert_close, log_columns, read_bytes, run_ok

sys.path.insert(0, os.path.join(ROOT, "dev/data"))
import plot_log                         # noqa: E402
import tensorboard_log                  # noqa: E402

pytestmark = pytest.mark.cpu_only


def write(path, text):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


def made_run(folder, steps=20, **settings):
    """A run's files, in the forms that llmc/run/logger.h writes; the loss of step k is 10/(k+1)."""
    log, records = "", ""
    for step in range(steps + 1):
        if step % 10 == 0:
            log += f"s:{step} tel:{11 / (step + 1):.6f}\ns:{step} eval:0.25{step:04d}\n"
            records += f'{{"step": {step}, "val_loss": {11 / (step + 1)}}}\n'
        if step < steps:
            log += f"s:{step} trl:{10 / (step + 1):.6f} lr:1.000000e-03 norm:{step + 1}.0000\n"
            records += (f'{{"step": {step + 1}, "loss": {10 / (step + 1)}, "lr": 1e-3, "norm": {step + 1}, '
                        f'"tokens": {64 * (step + 1)}, "ms": 2, "tokens_per_s": {32000 + step}}}\n')
    write(folder + "/main.log", log)
    write(folder + "/metrics.jsonl", records)
    write(folder + "/run.json", json.dumps({"settings": settings}))


def append(path, text):
    with open(path, "a", encoding="ascii") as f:
        f.write(text)


def fails(function, *args):
    """The sentence with which it ends."""
    with pytest.raises(SystemExit) as end:
        function(*args)
    assert str(end.value).startswith("error: ") and str(end.value).count("\n") <= 2
    return str(end.value)


# ---- what is read ----

def test_plot_of_a_real_run():
    run_ok({"-x": 6, "-v": 3, "-m": 1, "-b": 1, "-t": 8, "-o": "real"})
    run, columns = plot_log.Run("real"), log_columns("real")
    for name, column in (("train", "trl"), ("lr", "lr"), ("norm", "norm")):
        assert run.curves[name] == (columns["step"], columns[column])
    with open("real/metrics.jsonl", encoding="ascii") as f:
        speeds = [r["tokens_per_s"] for r in map(json.loads, f) if "loss" in r]
    assert run.curves["speed"] == ([0, 1, 2, 3, 4, 5], speeds)
    assert run.curves["val"][0] == [0, 3, 6] and "eval" not in run.curves


def test_plot_reads():
    """The numbers of a run as it wrote them, but for half a line and for steps that it went back from."""
    made_run("made")
    whole = plot_log.Run("made").curves
    assert whole["eval"] == ([0, 10, 20], [0.250000, 0.250010, 0.250020])
    append("made/metrics.jsonl", '{"step": 20, "loss": 1, "ms": 2, "tokens_per_s": 3, "abandoned": 1}\n')
    append("made/metrics.jsonl", '{"step": 21, "val_lo')
    append("made/main.log", "s:20 tel:5.")
    assert plot_log.Run("made").curves == whole
    append("made/metrics.jsonl", "x\n")
    assert "made/metrics.jsonl:" in fails(plot_log.Run, "made")
    made_run("gpu", 1)
    append("gpu/metrics.jsonl",
           '{"step": 2, "gpu_mhz": 1910, "gpu_watts": 7, "gpu_celsius": null, "gpu_gib": 30}\n')
    curves = plot_log.Run("gpu").curves
    assert [curves[name] for name in ("clock", "power", "memory")] == [([1], [1910]), ([1], [7]), ([1], [30])]
    assert math.isnan(curves["temperature"][1][0])
    write("llmc/main.log", "s:0 tel:11.1\ns:0 trl:11.0 lr:0.000001 norm:15.3\n"
          "s:1 trl:nan lr:0.000002 norm:inf\n")
    assert plot_log.Run("llmc").curves["lr"] == ([0, 1], [1e-6, 2e-6]), "llm.c's log, and no other file"
    write("old/main.log", "s:0 trl:11.0\n")
    assert plot_log.Run("old/main.log").curves == {"train": ([0], [11.0])}, "an old log of llm.c"


@pytest.mark.parametrize("log, said", [(None, "cannot read nowhere"), ("", "no losses"),
                                       ("s:0 trl:1.2.3\n", "main.log:1"), ("s:0 trl:1\nx\n", "main.log:2")])
def test_plot_refuses(log, said):
    if log is not None:
        write("wrong/main.log", log)
    assert said in fails(plot_log.Run, "nowhere" if log is None else "wrong")


def test_plot_over_seconds():
    """A point stands where the steps before it end, first steps that compile included."""
    made_run("timed", 4)
    log = read_bytes("timed/metrics.jsonl").decode()
    write("timed/metrics.jsonl", log.replace('"ms": 2', '"ms": 5000', 1))
    run = plot_log.Run("timed")
    values = {name: curve[1] for name, curve in run.curves.items()}
    plot_log.by_seconds(run)
    for name, at in (("train", [0, 5, 5.002, 5.004]), ("val", [0]), ("speed", [0, 5, 5.002, 5.004])):
        assert_close(run.curves[name][0], at, 1e-9, f"{name}: seconds")
        assert run.curves[name][1] == values[name]
    os.remove("timed/metrics.jsonl")
    assert "timed/main.log has no times" in fails(plot_log.by_seconds, plot_log.Run("timed"))


def test_plot_smooth():
    """Means around each point: a straight line stays as it is, a NaN leaves a gap and nothing else."""
    line = [float(x) for x in range(1000)]
    assert_close(plot_log.smooth(line), line, 1e-9, "a straight line")
    assert_close(plot_log.smooth([float(x % 2) for x in range(1000)])[50:950], [0.5] * 900, 0.03, "noise")
    gap = plot_log.smooth(line[:500] + [math.nan, math.inf] + line[502:])
    assert [i for i, x in enumerate(gap) if math.isnan(x)] == [500, 501]
    assert all(abs(x - i) < 3 for i, x in enumerate(gap) if i not in (500, 501))
    assert (plot_log.smooth([]), plot_log.smooth([2.0])) == ([], [2.0])


# ---- what is drawn ----

def panels(figure):
    return {axes.get_title(): axes for axes in figure.axes}


def levels_of(*runs, **more):
    return [line.get_label() for axes in plot_log.draw(runs, **more).axes for line in axes.lines
            if len(line.get_xdata()) == 2 and line.get_linestyle() == ":"]


def test_plot_draws():
    """What is in the picture: panels, curves, names, levels."""
    pytest.importorskip("matplotlib")
    made_run("web", **{"val-data": "data/fineweb10B/fineweb_val_*.bin", "model": "d12"})
    made_run("other", 10, **{"val-data": "val.bin", "model": "d12"})
    web, other = plot_log.Run("web"), plot_log.Run("other")
    known = ["GPT-2 124M on FineWeb 3.425", "GPT-2 124M on HellaSwag 0.294"]
    assert levels_of(web) == known and levels_of(other) == [] and levels_of(other, gpt2=True) == known
    other.settings["eval-data"] = "dev/data/mmlu/mmlu_test.bin"
    assert levels_of(other, gpt2=True) == known[:1], "a run that answers other questions"
    assert levels_of(other, lines=[(1.5, "a bigram")]) == ["a bigram 1.500"]
    for data, model, wanted in (("edu_fineweb_val_0.bin", "d12", False), ("fineweb_val.bin", "d12", True),
                                ("fineweb.bin", "L4,NH4,C128,T128,V256", False),
                                ("FineWeb.bin", "L4,NH4,C128,T128,V50257", True)):
        web.settings = {"val-data": data, "model": model}
        assert web.is_on_fineweb() == wanted, f"{data}, {model}"
    web.settings = {}
    assert [axes.get_xlabel() for axes in plot_log.draw([web], across="s", loss_alone=True).axes] == ["s"]
    figure = panels(plot_log.draw([web, other]))
    titles = ["loss (nats per token)", "questions, normalised accuracy", "learning rate", "gradient norm",
              "tokens/s"]
    assert sorted(figure) == sorted(titles)
    assert figure[titles[0]].get_legend_handles_labels()[1] == [
        "web training loss", f"web validation loss, last {11 / 21:.3f}", "other training loss",
        "other validation loss, last 1.000"]
    drawn = [list(line.get_ydata()) for line in figure[titles[0]].lines]
    assert web.curves["train"][1] in drawn and other.curves["val"][1] in drawn
    assert web.curves["speed"][1] in [list(line.get_ydata()) for line in figure["tokens/s"].lines]
    write("llmc2/main.log", "s:0 tel:11.1\n")
    assert list(panels(plot_log.draw([plot_log.Run("llmc2")]))) == titles[:1], "only what was measured"


def test_plot_writes(monkeypatch):
    """Without a display; two folders of one name are told apart."""
    pytest.importorskip("matplotlib")
    made_run("one", 4)
    shutil.copytree("one", "sub/one")
    runs = [plot_log.Run(path) for path in ("one", "sub/one")]
    plot_log.tell_apart(runs)
    assert runs[1].name == "sub/one" != runs[0].name
    p = subprocess.run([sys.executable, plot_log.__file__, "one", "sub/one", "-o", "both.png"], check=True,
                       capture_output=True, text=True,
                       env={name: value for name, value in os.environ.items() if name != "DISPLAY"})
    assert (p.stdout, p.stderr) == ("wrote both.png\n", "")
    assert read_bytes("both.png")[:8] == b"\x89PNG\r\n\x1a\n"
    monkeypatch.setattr(sys, "argv", ["plot_log.py", "one", "-o", "nowhere/x.png"])
    assert "cannot write nowhere/x.png" in fails(plot_log.main)


# ---- TensorBoard ----

class Summary(dict):
    Value = dict


class Writer:
    """In the place of TensorBoard's own: each event becomes a line."""
    count = 0

    def __init__(self, folder):
        Writer.count += 1
        self.f = open(f"{folder}/events.out.tfevents.{Writer.count}", "w", encoding="ascii")

    def add_event(self, event):
        self.f.write(json.dumps(event) + "\n")

    def flush(self):
        self.f.flush()

    def close(self):
        self.f.close()


def events(folder):
    """[(step, {tag: value}, time)] of the one event file."""
    [name] = os.listdir(folder + "/tensorboard")
    with open(f"{folder}/tensorboard/{name}", encoding="ascii") as f:
        return [(event["step"], {v["tag"]: v["simple_value"] for v in event["summary"]["value"]},
                 event["wall_time"]) for event in map(json.loads, f)]


@pytest.fixture(name="stub")
def stub_of_the_library(monkeypatch):
    monkeypatch.setattr(tensorboard_log, "import_writer", lambda: (Writer, dict, Summary))
    return lambda *words: monkeypatch.setattr(sys, "argv", ["tensorboard_log.py", *words])


def test_tensorboard(stub, capsys):
    """Every number of metrics.jsonl, at the terminal's steps; once, also the second time."""
    made_run("board")
    stub("board")
    for _ in range(2):
        tensorboard_log.main()
        assert capsys.readouterr().out == "wrote board/tensorboard: 23 records\n"
        got = events("board")
        assert len(got) == 23
        assert [(k, v["loss/train"]) for k, v, _ in got if "loss/train" in v] == [(k + 1, 10 / (k + 1))
                                                                                for k in range(20)]
        assert [(k, v["loss/validation"]) for k, v, _ in got if "loss/validation" in v] == [
            (k, 11 / (k + 1)) for k in (0, 10, 20)]
        assert sorted({tag for _, v, _ in got for tag in v}) == [
            "loss/train", "loss/validation", "speed/ms", "speed/tokens_per_s", "train/lr", "train/norm",
            "train/tokens"]
        times = [at for _, _, at in got]
        assert_close([times[-1] - times[0], times[-1]], [0.04, os.stat("board/metrics.jsonl").st_mtime], 1e-3,
                     "times")
    stub("nowhere")
    assert "there is no nowhere/metrics.jsonl" in fails(tensorboard_log.main)


def test_tensorboard_follows(stub, monkeypatch):
    """New lines come as they are written; a run that went back to a checkpoint is written anew."""
    made_run("live", 10)
    with open("live/metrics.jsonl", encoding="ascii") as f:
        lines = f.readlines()
    write("live/metrics.jsonl", "".join(lines[:5]))
    seen = []

    def wait(seconds):                                  # what happens while it waits
        assert 0.5 <= seconds <= 10
        seen.append([step for step, _, _ in events("live")])
        if len(seen) == 1:
            append("live/metrics.jsonl", lines[5] + lines[6][:7])
        elif len(seen) == 2:
            write("live/metrics.jsonl", "".join(lines[:3]) + '{"step": 3, "loss": 7}\n')
        else:
            raise KeyboardInterrupt
    monkeypatch.setattr(tensorboard_log.time, "sleep", wait)
    stub("live", "--follow")
    tensorboard_log.main()
    assert seen == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]


def test_tensorboard_is_missing():
    shutil.copytree(os.path.join(ROOT, "dev/data"), "tree/dev/data",
                    ignore=lambda _, names: [name for name in names if not name.endswith("_log.py")])
    shutil.copy(os.path.join(ROOT, "dev/venv_python.py"), "tree/dev")
    write("missing/tensorboard.py", "raise ImportError\n")
    made_run("alone", 1)
    p = subprocess.run([sys.executable, "tree/dev/data/tensorboard_log.py", "alone"], capture_output=True,
                       text=True, env={**os.environ, "PYTHONPATH": "missing"}, check=False)
    assert p.returncode == 1 and "scripts/setup.sh tensorboard" in p.stderr and "Trace" not in p.stderr


def test_tensorboard_itself(monkeypatch):
    """The real library, where it is installed, writes what TensorBoard reads."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    made_run("itself")
    monkeypatch.setattr(sys, "argv", ["tensorboard_log.py", "itself"])
    tensorboard_log.main()
    seen = accumulator.EventAccumulator("itself/tensorboard")
    seen.Reload()
    got = [event.value for event in seen.Scalars("loss/train")]
    assert_close(got, [10 / (k + 1) for k in range(20)], 1e-6, "losses")

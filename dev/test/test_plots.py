"""Pictures and TensorBoard's event files of runs: dev/data/plot_log.py and tensorboard_log.py.
"""
import contextlib
import json
import math
import os
import pty
import shutil
import subprocess
import sys
import types

import pytest

from checks import ROOT, read, run_program, write
from trainer import assert_close, log_columns, logged_steps, run_ok

sys.path.insert(0, os.path.join(ROOT, "dev/data"))
import plot_log                         # noqa: E402
import tensorboard_log                  # noqa: E402

pytestmark = pytest.mark.cpu_only
LOSS, HALF = "loss (nats per token)", f"{11 / 21:.3f}"


def append(path, text):
    write(path, read(path) + text.encode())


def made_run(folder, steps=20, batch=64, **settings):
    """A run's files, in the forms that llmc/run/logger.h writes; the loss of step k is 10/(k+1)."""
    log, records = "", ""
    for step in range(steps + 1):
        if step % 10 == 0:
            log += f"s:{step} tel:{11 / (step + 1):.6f}\ns:{step} eval:0.25{step:04d}\n"
            records += f'{{"step": {step}, "val_loss": {11 / (step + 1)}}}\n'
        if step < steps:
            log += f"s:{step} trl:{10 / (step + 1):.6f} lr:1.000000e-03 norm:{step + 1}.0000\n"
            records += (f'{{"step": {step + 1}, "loss": {10 / (step + 1)}, "lr": 1e-3, "norm": {step + 1}, '
                        f'"tokens": {batch * (step + 1)}, "ms": 2, "tokens_per_s": {32000 + step}}}\n')
    write(folder + "/main.log", log)
    write(folder + "/metrics.jsonl", records)
    write(folder + "/run.json", json.dumps({"settings": settings}))


def fails(function, *args):
    """The sentence with which it ends."""
    with pytest.raises(SystemExit) as end:
        function(*args)
    assert str(end.value).startswith("error: ") and str(end.value).count("\n") <= 2
    return str(end.value)


# ---- on a terminal ----

TOOLS = ["data/get.py files --out out --from", "data/get.py NAME --out", "data/get.py --NAME",
         "data/plot_log.py", "data/tensorboard_log.py", "hf.py export NAME", "hf.py gguf NAME",
         "hf.py llama2c NAME", "hf.py import --out NAME"]


@pytest.mark.parametrize("tool", TOOLS)
def test_control_characters(tool):
    """A name commands no terminal. A pipe gets its bytes."""
    name = "a\x1b[2J\x9b\x07\r\x7fé.txt"
    script, *words = tool.split()
    command = [sys.executable, os.path.join(ROOT, "dev", script)]
    command += [word.replace("NAME", name) for word in words] + [name] * ("--NAME" not in words)
    piped = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    said = piped.stdout + piped.stderr
    if b"no tensorboard" in said or b"without tensorboard" in said or b"no gguf" in said:
        pytest.skip(said.decode().splitlines()[0])
    assert name.encode() in said and piped.returncode > 0
    subprocess.run(["sh", "-c", 'exec "$@" --help >&- 2>&-', "sh", *command[:2]], check=True)
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):          # EIO is its end
            while block := os.read(ours, 4096):
                shown += block
    os.close(ours)
    assert child.returncode == piped.returncode
    escaped = name.replace("é", "").encode("unicode_escape").partition(b".")[0]
    assert escaped + "é.txt".encode() in shown and shown.replace(b"\r\n", b"\n").decode().translate(
        {10: 32}).isprintable()


# ---- what is read ----

def test_plot_of_a_real_run():
    run_ok({"-x": 6, "-v": 3, "-m": 1, "-b": 1, "-t": 8, "-o": "real"})
    run, columns = plot_log.Run("real"), log_columns("real")
    for name, column in (("train", "trl"), ("lr", "lr"), ("norm", "norm")):
        assert run.curves[name] == (columns["step"], columns[column])
    speeds = [step["tokens_per_s"] for step in logged_steps("real")]
    assert run.curves["speed"] == ([0, 1, 2, 3, 4, 5], speeds)
    assert run.curves["val"][0] == [0, 3, 6] and "eval" not in run.curves
    assert run.facts()[1:] == ["48 tokens", f"validation loss {run.curves['val'][1][-1]:.3f}"]


def test_plot_reads():
    """The numbers of a run as it wrote them, but for half a line."""
    made_run("made")
    whole = plot_log.Run("made").curves
    assert whole["eval"] == ([0, 10, 20], [0.250000, 0.250010, 0.250020])
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
    write("llmc/main.log", "s:0 tel:11.1 more words\ns:0 trl:11.0 lr:0.000001 norm:15.3\n"
          "s:1 trl:nan lr:0.000002 norm:inf ms:7\n")
    run = plot_log.Run("llmc")
    assert run.curves["lr"] == ([0, 1], [1e-6, 2e-6]), "llm.c's log, and no other file"
    assert run.curves["val"] == ([0], [11.1]) and run.facts() == ["2 steps", "training loss nan"]
    write("old/main.log", "s:0 trl:11.0\n")
    assert plot_log.Run("old/main.log").curves == {"train": ([0], [11.0])}, "an old log of llm.c"
    os.symlink("metrics.jsonl", "old/metrics.jsonl")            # a link to itself: not as if there was none
    assert "cannot read" in fails(plot_log.Run, "old")


@pytest.mark.parametrize("log, said", [(None, "cannot read nowhere"), ("", "no losses"),
                                       ("s:0 trl:1.2.3\n", "main.log:1"), ("s:0 trl:1\nx\n", "main.log:2")])
def test_plot_refuses(log, said):
    if log is not None:
        write("wrong/main.log", log)
    assert said in fails(plot_log.Run, "nowhere" if log is None else "wrong")


def test_plot_smooth():
    """Means around each point, at the end of those before it; a NaN leaves a gap and nothing else."""
    line = [float(x) for x in range(1000)]
    assert_close(plot_log.smooth(line)[:990], line[:990], 1e-9, "a straight line")
    assert plot_log.smooth(line)[-1] == sum(line[-11:]) / 11
    assert_close(plot_log.smooth([float(x % 2) for x in range(1000)])[50:950], [0.5] * 900, 0.03, "noise")
    gap = plot_log.smooth(line[:500] + [math.nan, math.inf] + line[502:])
    assert [i for i, x in enumerate(gap) if math.isnan(x)] == [500, 501]
    assert all(abs(x - i) < 3 for i, x in enumerate(gap[:990]) if i not in (500, 501))
    assert (plot_log.smooth([]), plot_log.smooth([2.0])) == ([], [2.0])
    assert [plot_log.short(x) for x in (0, 6e-4, 999, 1280, 999960, 1e10)] == [
        "0", "0.0006", "999", "1.28K", "1M", "10B"]


# ---- what is drawn ----

def draw(*folders, **more):
    """The figure, its panels by title, and the curves of each: {label: [xs, ys]}."""
    pytest.importorskip("matplotlib")
    figure = plot_log.draw([plot_log.Run(folder) for folder in folders], **more)
    return figure, {axes.get_title("left"): axes for axes in figure.axes}, [
        {line.get_label(): [list(line.get_xdata()), list(line.get_ydata())] for line in axes.lines}
        for axes in figure.axes]


def test_plot_of_one_run():
    made_run("web", model="data/d12/")
    made_run("a", model="d12")
    write("tuned/main.log", "s:0 tel:3.0\ns:0 trl:3.0\ns:5 tel:2.5\n")
    figure, panels, curves = draw("web")
    assert (figure.get_suptitle(), figure.get_supxlabel()) == (
        f"web · d12 · 1.28K tokens · validation loss {HALF} · accuracy 0.250", "step")
    assert list(panels) == [LOSS, "questions, normalised accuracy", "learning rate", "gradient norm",
                            "tokens/s"]
    append("web/metrics.jsonl", '{"step": 3, "gpu_mhz": 1910, "gpu_watts": 7, "gpu_gib": 30}\n')
    for folder, count in (("web", 8), ("tuned", 1), ("a", 5)):
        places = [axes.get_subplotspec() for axes in draw(folder)[0].axes]
        filled, grid = sum(len(p.rowspan) * len(p.colspan) for p in places), places[0].get_gridspec()
        assert (len(places), filled) == (count, grid.nrows * grid.ncols), "an empty place"
    loss = plot_log.Run("web").curves["train"]
    assert list(loss) in curves[0].values() and "training, smoothed" in curves[0]
    assert curves[0]["validation"] == [[10, 20], [1.0, 0.523810]], "without that of the untrained model"
    low, high = panels[LOSS].get_ylim()
    assert low < loss[1][-1] and loss[1][2] < high < loss[1][1], "the fall of the first tenth"
    assert panels["tokens/s"].get_ylim()[0] == 0
    assert [[text.get_text() for text in axes.texts] for axes in panels.values()] == [
        ["0.513", "0.524"], ["0.250"], [], ["19.50"], ["32,018"]]
    assert panels[LOSS].texts[1].get_position()[1] > panels[LOSS].texts[0].get_position()[1] + 0.04, "overlap"
    assert draw("tuned")[2][0]["validation"] == [[0, 5], [3.0, 2.5]], "of a model that was trained before"
    write("llmc2/main.log", "s:0 tel:11.1\n")
    assert list(draw("llmc2")[1]) == [LOSS], "only what was measured"


def test_plot_of_several_runs():
    """Over steps, or over tokens if their batches differ; the title has what all share."""
    made_run("a", model="d12")
    made_run("b", 10, model="d12")
    made_run("large", batch=256, model="d12")
    write("llmc3/main.log", "s:0 trl:9.5\n")
    figure, panels, curves = draw("a", "b")
    assert (figure.get_suptitle(), figure.get_supxlabel()) == ("d12 · accuracy 0.250", "step")
    names = [f"a · 1.28K tokens · validation loss {HALF}", "b · 640 tokens · validation loss 1.000"]
    assert panels[LOSS + ", validation as points"].get_legend_handles_labels()[1] == names
    assert [line.get_linestyle() for line in panels[LOSS + ", validation as points"].lines
            if line.get_marker() == "o"] == ["None", "None"]
    assert curves[0][names[1]][0] == list(range(10))
    made_run("m12", model="m12")
    figure, _, curves = draw("a", "m12", title="both")
    assert figure.get_suptitle() == "both" and {"a · d12", "m12"} < set(curves[0]), "no name twice"
    figure, _, curves = draw("a", "large", loss_alone=True)
    assert (figure.get_supxlabel(), len(figure.axes)) == ("tokens", 1)
    assert curves[0]["large · 5.12K tokens"][0] == [256 * step for step in range(20)]
    figure, _, _ = draw("a", "llmc3")
    assert (figure.get_suptitle(), figure.get_supxlabel()) == ("a, llmc3", "step"), "whose batch nobody knows"


def test_plot_over_seconds():
    """A point stands where the steps before it end, first steps that compile included."""
    made_run("timed", 4)
    log = read("timed/metrics.jsonl").decode()
    write("timed/metrics.jsonl", log.replace('"ms": 2', '"ms": 5000', 1))
    run = plot_log.Run("timed")
    values = {name: curve[1] for name, curve in run.curves.items()}
    run.go_over("seconds")
    for name, at in (("train", [0, 5, 5.002, 5.004]), ("val", [0]), ("speed", [0, 5, 5.002, 5.004])):
        assert_close(run.curves[name][0], at, 1e-9, f"{name}: seconds")
        assert run.curves[name][1] == values[name]
    figure, _, curves = draw("timed", seconds=True)
    assert figure.get_supxlabel() == "seconds of training"
    assert_close(curves[0]["training, smoothed"][0], [0, 5, 5.002, 5.004], 1e-9, "seconds")
    os.remove("timed/metrics.jsonl")
    assert "timed/main.log has no times" in fails(plot_log.draw, [plot_log.Run("timed")], (), True)


def add_sources(folder, steps):
    """Validation losses of two sources, as of a mixture."""
    for step in steps:
        append(f"{folder}/metrics.jsonl", f'{{"step": {step}, "val_loss": 2.5, "val_losses": '
               f'{{"web": {3 - step / 100}, "code": 2}}}}\n')


def test_plot_of_a_mixture():
    """Its sources have curves of their own; in a picture of several runs they have none."""
    made_run("mix", **{"val-data": "d/fineweb_val_*.bin:1,d/code_val_*.bin:1"})
    add_sources("mix", (0, 10, 20))
    curves = draw("mix")[2][0]
    assert curves["validation web"] == [[0, 10, 20], [3, 2.9, 2.8]]
    assert curves["validation code"] == [[0, 10, 20], [2, 2, 2]]
    assert "validation" in curves and not [name for name in curves if "GPT-2" in name]
    made_run("other")
    assert [name for name in draw("mix", "other")[2][0] if "web" in name or "code" in name] == []


def test_before_the_second_validation():
    """The untrained model's loss is no end, and stretches the picture only while training is near it."""
    for name, last, curves in (("near", 9.5, {"training, smoothed", "validation"}),
                               ("far", 4, {"training, smoothed"})):
        write(f"{name}/main.log", f"s:0 tel:10.0\ns:0 trl:10.0\ns:1 trl:{last}\n")
        figure, panels, [drawn] = draw(name)
        assert drawn.keys() - {"_child0"} == curves
        assert figure.get_suptitle() == f"{name} · 2 steps · training loss {last:.3f}"
        assert [text.get_text() for text in panels[LOSS].texts] == [f"{last:.3f}"]


def test_labels_end_below_the_title():
    for i in range(5):
        write(f"up{i}/main.log", f"s:0 trl:1.0\ns:9 trl:{2 + i / 1000}\n")
    [axes] = draw(*(f"up{i}" for i in range(5)))[0].axes
    places = [text.get_position()[1] for text in axes.texts]
    assert len(places) == 5 and max(places) <= 1
    assert all(above - below > 0.049 for below, above in zip(places, places[1:])), "overlap"


@pytest.mark.parametrize("data, model, known", [
    ("edu_fineweb_val_0.bin", "d12", False), ("data/fineweb10B/fineweb_val_*.bin", "d12", True),
    ("fineweb.bin", "L4,NH4,C128,T128,V256", False), ("FineWeb.bin", "L4,NH4,C128,T128,V50257", True)])
def test_plot_levels(data, model, known):
    """OpenAI's, of the data that they were measured on, and those that the caller names."""
    for questions, named in (("hellaswag_val.bin", ["GPT-2 124M on HellaSwag 0.294"]), ("mmlu_test.bin", [])):
        made_run("level", 4, **{"val-data": data, "model": model, "eval-data": questions})
        figure = draw("level", lines=[(1.5, "a bigram")])[0]
        assert [line.get_label() for axes in figure.axes for line in axes.lines
                if line.get_linestyle() == ":"] == ["a bigram 1.500"] + (
                    ["GPT-2 124M on FineWeb 3.425"] + named if known else [])


def test_few_validations_are_points():
    """A line between them would show losses that nobody has measured."""
    for steps, wanted in ((50, "None"), (100, "--")):
        made_run("few", steps)
        [line] = [line for line in draw("few")[0].axes[0].lines if line.get_label() == "validation"]
        assert (line.get_linestyle(), line.get_marker()) == (wanted, "o")


def test_plot_writes(monkeypatch):
    """Without a display, also a run of NaNs; two folders of one name are told apart."""
    pytest.importorskip("matplotlib")
    made_run("one", 4)
    write("bad/main.log", "s:0 tel:nan\ns:0 trl:nan lr:0 norm:nan\ns:1 trl:nan lr:0 norm:inf\n")
    shutil.copytree("one", "sub/one")
    runs = [plot_log.Run(path) for path in ("one", "sub/one")]
    plot_log.tell_apart(runs)
    assert runs[1].name == "sub/one" != runs[0].name
    plot = [sys.executable, plot_log.__file__, "one", "sub/one", "bad", "-o", "all.png"]
    assert run_program(plot, DISPLAY=None) == (0, "wrote all.png\n", "")
    assert read("all.png")[:8] == b"\x89PNG\r\n\x1a\n"
    monkeypatch.setattr(sys, "argv", ["plot_log.py", "one", "-o", "nowhere/x.png"])
    assert "cannot write nowhere/x.png" in fails(plot_log.main)


# ---- TensorBoard ----

class Recorder:
    """In the place of the library's writer; the last that began has steps: {step: {tag: value}}."""
    def __init__(self, folder):
        Recorder.last, self.steps, self.times, self.flush, self.closed = self, {}, [], list, False
        write(f"{folder}/events.out.tfevents.{id(self)}", "")

    def add_scalar(self, tag, value, step, wall_time):
        assert tag not in self.steps.setdefault(step, {}), "written twice"
        self.steps[step][tag] = value
        self.times.append(wall_time)

    def close(self):
        self.closed = True


@pytest.fixture(name="call")
def call_with_stand_ins(monkeypatch):
    """Runs the tool; returns what the library got."""
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["tensorboard_log.py", *words])
        tensorboard_log.main()
        return Recorder.last
    monkeypatch.setitem(sys.modules, "tensorboard.summary", types.SimpleNamespace(Writer=Recorder))
    return call


def test_tensorboard(call, capsys):
    """Every number of metrics.jsonl, at the terminal's steps; once, also the second time."""
    made_run("board")
    for _ in range(2):
        got = call("board")
        assert capsys.readouterr().out == "wrote board/tensorboard: 23 records\n"
        assert [values.get("loss/train") for values in got.steps.values()] == [None] + [
            10 / (k + 1) for k in range(20)]
        assert [got.steps[k]["loss/validation"] for k in (0, 10, 20)] == [11, 1, 11 / 21]
        assert sorted({tag for values in got.steps.values() for tag in values}) == [
            "loss/train", "loss/validation", "speed/ms", "speed/tokens_per_s", "train/lr", "train/norm",
            "train/tokens"]
        assert got.closed and len(got.times) == 3 + 6 * 20
        assert len(os.listdir("board/tensorboard")) == 1, "those before are gone"
        assert_close([got.times[-1] - got.times[0], got.times[-1]],
                     [0.04, os.stat("board/metrics.jsonl").st_mtime], 1e-3, "times")
    assert "cannot read nowhere/metrics.jsonl" in fails(call, "nowhere")


def test_tensorboard_of_a_mixture(call):
    made_run("board_mix", 1)
    add_sources("board_mix", (5,))
    assert call("board_mix").steps[5] == {"loss/validation": 2.5, "loss/validation/web": 2.95,
                                          "loss/validation/code": 2}


def test_tensorboard_follows(call, monkeypatch):
    """New lines come as they are written; a run that went back to a checkpoint is written anew."""
    made_run("live", 10)
    lines = read("live/metrics.jsonl").decode().splitlines(True)
    write("live/metrics.jsonl", "".join(lines[:5]))
    seen = []

    def wait(seconds):                                  # what happens while it waits
        assert 0.5 <= seconds <= 10
        seen.append(list(Recorder.last.steps))
        if len(seen) == 1:
            append("live/metrics.jsonl", lines[5] + lines[6][:7])
        elif len(seen) == 2:
            write("live/metrics.jsonl", "".join(lines[:3]) + '{"step": 3, "loss": 7}\n')
        else:
            raise KeyboardInterrupt
    monkeypatch.setattr(tensorboard_log.time, "sleep", wait)
    call("live", "--follow")
    assert seen == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]


def test_tensorboard_is_missing():
    write("missing/tensorboard.py", "raise ImportError\n")
    made_run("alone", 1)
    code, _, err = run_program([sys.executable, tensorboard_log.__file__, "alone"], PYTHONPATH="missing")
    assert code == 1 and "setup.sh tensorboard" in err and "Trace" not in err


def test_tensorboard_itself(monkeypatch):
    """The real library, where it is installed, writes what TensorBoard reads."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    made_run("itself")
    monkeypatch.setattr(sys, "argv", ["tensorboard_log.py", "itself"])
    tensorboard_log.main()
    seen = accumulator.EventAccumulator("itself/tensorboard", size_guidance={"tensors": 0})
    seen.Reload()
    got = [event.tensor_proto.float_val[0] for event in seen.Tensors("loss/train")]
    assert_close(got, [10 / (k + 1) for k in range(20)], 1e-6, "losses")

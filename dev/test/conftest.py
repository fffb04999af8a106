"""What pytest has to know about these tests; docs/testing.md says how to run them and how to add one.

A module that imports something from trainer.py runs a training program. Each of its tests runs once for each
program that it is meant for: with ./train_gpt2cpu, or with the CPU builds that its marker `programs` names;
where there is a GPU also with build/check/train_gpt2.PRECISION.

A module's tests share a temporary folder in which they start, and its functools caches, as long as one process
(of pytest-xdist's) runs tests of this module with one program: data that several tests want is made once.
"""
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

pytest.register_assert_rewrite("trainer", "checks")
import checks                                       # noqa: E402
import trainer                                      # noqa: E402
from trainer import Program                         # noqa: E402

ROOT = checks.ROOT
CUDA = ("BF16", "FP16", "FP32")
PROGRAMS = {"cpu": "train_gpt2cpu", "lazy": "build/train_gpt2lazy", "asan": "build/asan/train_gpt2cpu",
            "plain": "build/plain/train_gpt2cpu", **{kind: "build/check/train_gpt2." + kind for kind in CUDA}}


def pytest_addoption(parser):
    group = parser.getgroup("GPT-2")
    group.addoption("--program", help="run this training program only (default: all that a test is meant for)")
    group.addoption("--precision", choices=CUDA, help="what the programs must be built for")
    group.addoption("--slow", action="store_true", help="also what takes minutes")
    group.addoption("--update-golden", action="store_true", help="write golden.json anew (without -n)")
    group.addoption("--keep", action="store_true", help="keep the temporary folders, and name them")


def list_gpus():
    """As CUDA_VISIBLE_DEVICES names them."""
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    there = [str(i) for i in range(sum(line.startswith("GPU ") for line in said.stdout.splitlines()))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [word for word in visible.split(",") if word] if there and visible is not None else there


def pytest_configure(config):
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")     # spinning threads would starve each other
    # A shell's background jobs begin with the first ignored, nohup's with the second, and what is tested here
    # would inherit that. A handler is not inherited, even one that ignores.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    config.gpus = list_gpus()
    if given := config.getoption("--program"):
        PROGRAMS["cpu"] = given


# ---- which programs a test runs ----

def runs_a_program(module):
    return any(getattr(value, "__module__", "") == "trainer" for value in vars(module).values())


def add_old_markers(definition, module):
    """Modules that have no markers yet name their tests in lists, as in NUMERIC."""
    name = definition.name.partition("[")[0][5:]
    if name in getattr(module, "NUMERIC", ()):
        definition.add_marker("numeric")
    if name not in getattr(module, "ON_GPUS", [name]):
        definition.add_marker("cpu_only")


def programs_of(definition, given):
    markers = {marker.name: marker.args for marker in definition.iter_markers()}
    on_cpu = [] if {"gpu"} & set(markers) else markers.get("programs", ["cpu"])
    on_gpu = CUDA if "numeric" in markers else ["BF16"]
    on_gpu = [kind for kind in on_gpu if "gpus" not in markers or kind != "FP16"]
    return [*on_cpu, *([] if given or "cpu_only" in markers else on_gpu)]


def pytest_generate_tests(metafunc):
    if runs_a_program(metafunc.module):
        add_old_markers(metafunc.definition, metafunc.module)
        if Program.usual is not trainer.USUAL:              # the module was imported just now
            metafunc.module.USUAL, Program.usual = Program.usual, trainer.USUAL
        metafunc.fixturenames.append("program")
        given = metafunc.config.getoption("--program")
        metafunc.parametrize("program", programs_of(metafunc.definition, given), indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """A module's tests stand together, those with one program too, as they share a folder."""
    modules = list(dict.fromkeys(item.module for item in items))
    kinds = list(PROGRAMS)
    for item in items:
        add_old_markers(item, item.module)
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: --slow runs it"))
    items.sort(key=lambda item: (modules.index(item.module), kinds.index(program_name(item) or "cpu")))


def program_name(item):
    return item.callspec.params.get("program") if hasattr(item, "callspec") else None


# ---- a test's folder and program ----

class Folder:
    """Where the tests of a module and program are that ran last."""
    path = owner = None

    @staticmethod
    def leave(keep):
        os.chdir(ROOT)
        if Folder.path and keep:
            print(f"kept {Folder.path}", file=sys.__stderr__)
        elif Folder.path:
            shutil.rmtree(Folder.path)
        Folder.path = Folder.owner = None


@pytest.fixture
def program(request):
    """The training program's path."""
    name, config = request.param, request.config
    path = os.path.join(ROOT, PROGRAMS[name])
    if name in CUDA and len(config.gpus) < 1 + bool(request.node.get_closest_marker("gpus")):
        pytest.skip("needs a GPU" if not config.gpus else "needs several GPUs")
    if not os.access(path, os.X_OK):
        (pytest.fail if name == "cpu" else pytest.skip)(f"no {PROGRAMS[name]}: make {PROGRAMS[name]}")
    return path


@pytest.fixture(autouse=True)
def in_its_folder(request):
    path = request.getfixturevalue("program") if program_name(request.node) else None
    if Folder.owner != (request.module, path):
        keep = request.config.getoption("--keep")
        Folder.leave(keep)
        for value in vars(request.module).values():             # what they say is in the old folder
            if hasattr(value, "cache_clear"):
                value.cache_clear()
        Folder.path = tempfile.mkdtemp(prefix="test_gpt2_")
        Folder.owner = request.module, path
        os.chdir(Folder.path)
        if path:
            trainer.write_shard("train.bin", trainer.sentences(1, 20000))
            trainer.write_shard("val.bin", trainer.sentences(2, 3000))
    os.chdir(Folder.path)
    if path:
        Program.usual = getattr(request.module, "USUAL", trainer.USUAL)
        trainer.look_at(path, request.config.getoption("--precision"))
        Program.slow = request.config.getoption("--slow")
        if "CPU" not in Program.device and request.node.get_closest_marker("cpu_only"):
            pytest.skip("for CPU programs only")
    checks.skipped.clear()
    yield
    os.chdir(ROOT)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test in which checks.skip() was called is no passed one."""
    report = yield
    if call.when == "call" and report.passed and checks.skipped:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "; ".join(checks.skipped))
    return report


# ---- the end ----

def pytest_sessionfinish(session):
    Folder.leave(session.config.getoption("--keep"))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """The very last line, by which CI counts."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not hasattr(config, "workerinput") and not config.option.collectonly:
        passed, failed, errors, skipped = (len(reporter.stats.get(name, ()))
                                           for name in ("passed", "failed", "error", "skipped"))
        print(f"{passed} passed, {failed + errors} failed, {skipped} skipped")

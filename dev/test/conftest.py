"""What pytest has to know about these tests; docs/testing.md says how to run them and how to add one.

A module that imports something from trainer.py runs a training program. Each of its tests runs once for each
program that it is meant for: with ./train_gpt2cpu, or with the CPU builds that its marker `programs` names;
where there is a GPU also with build/check/train_gpt2.PRECISION.

A module's tests share a temporary folder in which they start, and the module's functools caches, as long as
one process (of pytest-xdist's) runs tests of this module with one program: what several want is made once.
"""
import os
import shutil
import signal
import sys
import tempfile

import pytest

pytest.register_assert_rewrite("trainer", "checks", "jobs")
from checks import ROOT                              # noqa: E402
import gpus                                         # noqa: E402
import status                                       # noqa: E402
import trainer                                      # noqa: E402
from trainer import Program                         # noqa: E402

CUDA = ("BF16", "FP16", "FP32")
PROGRAMS = {"cpu": "train_gpt2cpu", "lazy": "build/train_gpt2lazy", "asan": "build/asan/train_gpt2cpu",
            "plain": "build/plain/train_gpt2cpu", **{kind: "build/check/train_gpt2." + kind for kind in CUDA}}


def pytest_addoption(parser):
    group = parser.getgroup("GPT-2")
    group.addoption("--program", help="run this program only (default: all that a test is meant for)")
    group.addoption("--slow", action="store_true", help="also what takes minutes")
    group.addoption("--update-golden", action="store_true", help="write golden.json anew (without -n)")
    group.addoption("--missing", action="store_true", help="on GPUs what has not passed on these sources")
    group.addoption("--update-names", action="store_true", help="write names.txt anew")
    group.addoption("--keep", action="store_true", help="keep the temporary folders, and name them")


def pytest_configure(config):
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")     # spinning threads would starve each other
    # A shell's background jobs begin with the first ignored, nohup's with the third, and what is tested here
    # would inherit that. A handler is not inherited, even one that ignores.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # what has ended is still written
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    if getattr(config.option, "dist", "") == "load":                # as -n chooses by itself
        config.option.dist = "worksteal"
    config.gpus, config.sources = gpus.list_gpus(), gpus.cuda_hash()
    if given := config.getoption("--program"):
        PROGRAMS["cpu"] = given
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(Table(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """`-n auto`: some tests wait half of their time. A container may have a quota for fewer cores."""
    cores, here, quota = len(os.sched_getaffinity(0)), len(gpus.list_gpus()), "/sys/fs/cgroup/cpu.max"
    most, *period = trainer.read(quota).decode().split() if os.path.exists(quota) else ["max"]
    cores = cores if most == "max" else min(cores, -(-int(most) // int(period[0])))
    return min(cores, gpus.PROGRAMS_A_GPU * here) if here else cores + 2


# ---- which programs a test runs ----

def runs_a_program(module):
    return any(getattr(value, "__module__", "") == "trainer" for value in vars(module).values())


def programs_of(definition, given):
    markers = {marker.name: marker.args for marker in definition.iter_markers()}
    on_cpu = [] if {"gpu"} & set(markers) else markers.get("programs", ["cpu"])
    on_gpu = CUDA if "numeric" in markers else ["BF16"]
    on_gpu = [kind for kind in on_gpu if "gpus" not in markers or kind != "FP16"]
    return [*on_cpu, *([] if given or "cpu_only" in markers else on_gpu)]


def pytest_generate_tests(metafunc):
    if runs_a_program(metafunc.module):
        metafunc.fixturenames.append("program")
        given = metafunc.config.getoption("--program")
        metafunc.parametrize("program", programs_of(metafunc.definition, given), indirect=True)


def needs_gpus(item):
    """0, 1 or 2 for several"""
    if program_name(item) not in CUDA and not item.get_closest_marker("gpu"):
        return 0
    return 2 if item.get_closest_marker("gpus") else 1


def suite_of(item):
    """What its row is in the table, and in gpu-results.txt."""
    name, kind = item.module.__name__.removeprefix("test_"), program_name(item)
    if name == "programs":
        return item.callspec.params["name"]
    if kind in CUDA:
        return gpus.row_name(name, kind, needs_gpus(item) == 2, item.config.gpus)
    return f"{name} {kind}" if kind else name


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """A module's tests stand together, those with one program too, as they share a folder."""
    modules = list(dict.fromkeys(item.module for item in items))
    kinds = list(PROGRAMS)
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: --slow runs it"))
        if needs_gpus(item):
            item.add_marker("gpu")                          # for `-m gpu`
    items.sort(key=lambda item: (modules.index(item.module), kinds.index(program_name(item) or "cpu")))
    suites = [suite_of(item) for item in items]
    totals = {suite: suites.count(suite) for suite in suites}
    for item, suite in zip(items, suites):
        item.user_properties.append(("suite", (suite, totals[suite], needs_gpus(item))))
    if config.getoption("--missing"):
        good = gpus.passed_rows(config.sources)
        items[:] = [item for item in items if not needs_gpus(item) or suite_of(item) not in good]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """Programs are dealt to the workers in turn, and run first: pytest-xdist's worksteal gives each worker an
    equal part of the list, and lets those that are done take from the end of others'."""
    session.items[:] = dealt(session.items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def dealt(items, workers):
    long = [item for item in items if item.module.__name__ == "test_programs"]
    rest, left, order = [item for item in items if item not in long], len(items), []
    for worker in range(workers):
        size = left // (workers - worker)
        part = long[worker::workers]
        few = max(0, size - len(part))
        order, rest, left = order + part + rest[:few], rest[few:], left - size
    return order + rest


def program_name(item):
    name = item.callspec.params.get("program") if hasattr(item, "callspec") else None
    return name if isinstance(name, str) else None              # no string where no program is meant for it


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


def pytest_runtest_setup(item):
    if needs_gpus(item) > len(item.config.gpus):
        pytest.skip("needs several GPUs" if item.config.gpus else "needs a GPU")


@pytest.fixture
def program(request):
    """The training program's path."""
    path = os.path.join(ROOT, PROGRAMS[request.param])
    if not os.access(path, os.X_OK):
        missing = pytest.fail if request.param == "cpu" else pytest.skip
        missing(f"no {PROGRAMS[request.param]}: make {PROGRAMS[request.param]}")
    return path


def enter(module, program, keep):
    """The folder of this module and program, a new one if others had their tests in between."""
    if Folder.owner != (module, program):
        Folder.leave(keep)
        for value in vars(module).values():             # what it remembers is in the old folder
            if hasattr(value, "cache_clear"):
                value.cache_clear()
        Folder.path, Folder.owner = tempfile.mkdtemp(prefix="test_gpt2_"), (module, program)
        os.chdir(Folder.path)
        if program:
            trainer.write_shard("train.bin", trainer.sentences(1, 20000))
            trainer.write_shard("val.bin", trainer.sentences(2, 3000))
    os.chdir(Folder.path)


@pytest.fixture(autouse=True)
def in_its_folder(request, monkeypatch):
    item, config = request.node, request.config
    if several := needs_gpus(item):
        suite, worker = suite_of(item), getattr(config, "workerinput", {"workerid": "gw0"})["workerid"]
        alone = suite.startswith("test_gpt2 ")
        # what runs at the same time is left to these: they have all of a GPU's hardware queues
        starts = not alone and several == 1 and suite != "resume BF16"
        env = gpus.environment(config.gpus, int(worker[2:]), several == 2, alone, starts)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
    path = request.getfixturevalue("program") if program_name(item) else None
    enter(request.module, path, config.getoption("--keep"))
    if path:
        Program.device, Program.precision = trainer.device_of(path)
        Program.path = path
        Program.usual = getattr(request.module, "USUAL", trainer.USUAL)
        Program.slow = config.getoption("--slow")
        if not trainer.on_cpu() and item.get_closest_marker("cpu_only"):
            pytest.skip("for CPU programs only")
    yield
    os.chdir(ROOT)


@pytest.fixture
def own_folder(in_its_folder, tmp_path, monkeypatch):
    """A new folder for each test that asks for it."""
    monkeypatch.chdir(tmp_path)


def pytest_sessionfinish(session):
    Folder.leave(session.config.getoption("--keep"))


# ---- the end ----

class Table:
    """Counts tests by suite; at the end writes gpu-results.txt and prints a table and the closing line."""

    def __init__(self, config):
        self.config, self.outcomes, self.seconds, self.totals, self.on_gpu = config, {}, {}, {}, set()
        self.whys = {}                          # why tests are skipped: how many

    def pytest_runtest_logreport(self, report):
        path = report.nodeid.partition("::")[0]
        suite, total, several = dict(report.user_properties).get("suite", (path, 0, 0))
        self.totals[suite] = total
        self.on_gpu |= {suite} if several else set()
        self.seconds[suite] = self.seconds.get(suite, 0) + getattr(report, "duration", 0)
        if report.skipped:
            why = str(report.longrepr[2]).removeprefix("Skipped: ")
            self.whys[why] = self.whys.get(why, 0) + 1
        if not report.passed or report.when == "call":
            self.outcomes.setdefault(suite, {}).setdefault(report.nodeid, report.outcome)
            if report.failed:
                self.outcomes[suite][report.nodeid] = "failed"

    def pytest_collectreport(self, report):
        if report.failed:
            self.outcomes.setdefault(report.nodeid, {})[report.nodeid] = "failed"

    def counts(self, suite):
        said = list(self.outcomes.get(suite, {}).values())
        return tuple(said.count(outcome) for outcome in ("passed", "failed", "skipped"))

    def total(self):
        return tuple(map(sum, zip((0, 0, 0), *map(self.counts, self.outcomes))))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        ended = {suite: self.counts(suite) for suite in self.on_gpu
                 if self.totals[suite] == len(self.outcomes.get(suite, ()))}
        if self.config.gpus and ended and "::" not in "".join(self.config.args):
            gpus.write_results(ended, self.config.sources)
            status.write_page()
        if session.exitstatus in (0, 5) and (self.total()[1] or not self.total()[0]):
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter):
        write = terminalreporter.write_line
        write(f"\n{'suite':<26}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
        for suite in self.outcomes:
            passed, failed, skipped = self.counts(suite)
            if passed or failed or self.config.gpus:
                write(f"{suite:<26}{passed:>8}{failed:>8}{skipped:>9}{self.seconds.get(suite, 0):>9.1f}")
        for why, count in sorted(self.whys.items(), key=lambda pair: -pair[1]):
            write(f"{count:>6} skipped: {why}")
        if self.on_gpu and not self.config.gpus:
            skipped = sum(self.counts(suite)[2] for suite in self.on_gpu)
            write(gpus.report_without_gpu(skipped, sorted(self.on_gpu), self.config.sources))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self):
        print("{} passed, {} failed, {} skipped".format(*self.total()))

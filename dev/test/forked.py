"""A Python program in a fork of the test's process, which has its modules already: hundreds of starts of
Python would take longer than all the rest.

    child = Forked(get.main, ["get.py", "files", "--from", "in"])
    os.kill(child.pid, signal.SIGTERM)
    code, out, err = child.end()
"""
import os
import resource
import signal
import sys
import tempfile
import traceback

LIMIT_S = 600                           # only a hang meets it


class Forked:
    """main() with sys.argv = argv; env: what the environment has besides; limit: the most bytes of a file."""

    def __init__(self, main, argv, env=(), limit=None):
        self.said = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                self.set_up([str(word) for word in argv], env, limit)
                code = exit_code(main)
            finally:
                os._exit(code)

    def set_up(self, argv, env, limit):
        os.setsid()
        for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), *(f.fileno() for f in self.said))):
            os.dup2(fd, number)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        signal.signal(signal.SIGINT, signal.default_int_handler)        # a shell's background jobs ignore it
        sys.argv, sys.stdout, sys.stderr = argv, open(1, "w", encoding="utf-8"), \
            open(2, "w", encoding="utf-8")
        os.environ.update(env)
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    def end(self):
        """(exit code, stdout, stderr)"""
        code, texts = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), []
        for f in self.said:
            with f:
                f.seek(0)
                texts.append(f.read().decode())
        return code, *texts


def exit_code(main):
    """As Python itself ends with it."""
    try:
        code = main()
    except SystemExit as e:
        code = e.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code or 0

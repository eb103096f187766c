"""What records of one run have in common, whatever measured them."""

import datetime
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[1]


def lines(command):
    """Of its output; none where it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip().splitlines()
    except OSError:
        return []


def first_line(command):
    return next(iter(lines(command)), "unknown")


def run_info(commit, command):
    """`commit`: of the measured source, where this is not a checkout of it."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "commit": commit or first_line(["git", "-C", str(ROOT), "rev-parse", "HEAD"]),
        "date": now.isoformat(timespec="seconds"),
        "command": command,
        "run": now.strftime("%Y%m%dT%H%M%S"),
    }

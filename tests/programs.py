"""Programs that tests run in processes of their own."""

import subprocess


def captured(command, check=True, timeout=300, **options):
    """Returns a program that has ended, with what it printed; it must succeed if ``check``."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done

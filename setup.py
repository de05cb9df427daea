"""What pyproject.toml cannot say: a build starts from an empty directory.

`pip install .` builds in `build/` of the checkout. Modules that an older checkout left there would be
installed, too.
"""

from __future__ import annotations

import shutil

from setuptools import setup
from setuptools.command.build import build


class CleanBuild(build):
    """Without what was built before."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(cmdclass={"build": CleanBuild})

"""--tls-cert, --tls-key and --worker-tls-ca: checked before anything is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrouter.errors import ConfigError
from kvrouter.frontend.__main__ import main
from kvrouter.frontend.settings import parse_options
from kvrouter.tls import CertificateFiles
from tests.certificates import Authority


def test_defaults() -> None:
    """Plain HTTP for clients, the system's authorities for workers."""
    tls = parse_options([]).tls

    assert (None, None, None) == (tls.files, tls.client_ca, tls.worker_ca)


def test_files(tmp_path: Path) -> None:
    """The flags name the files."""
    authority = Authority(tmp_path)
    files, ca = authority.sign(), authority.file
    tls = parse_options(
        ["--tls-cert", str(files.cert), "--tls-key", str(files.key), f"--worker-tls-ca={ca}"]
    ).tls

    assert (CertificateFiles(files.cert, files.key), ca) == (tls.files, tls.worker_ca)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tls-cert=a"], "--tls-cert without --tls-key: give both, or none"),
        (["--tls-key=a"], "--tls-key without --tls-cert"),
        (["--tls-cert=/nowhere", "--tls-key=/nowhere"], "--tls-cert /nowhere: No such file"),
        (["--worker-tls-ca=/nowhere"], "--worker-tls-ca /nowhere: No such file"),
        (["--tls-client-ca=/nowhere"], "--tls-client-ca without --tls-cert"),
        (["--worker-tls-cert=a"], "--worker-tls-cert without --worker-tls-key: give both, or none"),
        (["--worker-tls-cert=/nowhere", "--worker-tls-key=a"], "--worker-tls-cert /nowhere: No such file"),
    ],
)
@pytest.mark.usefixtures("quiet_logs")
def test_wrong_flags(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The process does not start: exit code 2, and a message with the way out."""
    with pytest.raises(ConfigError, match=said):
        parse_options(flags)

    assert 2 == main([*flags, "--port=0"])
    assert said in capsys.readouterr().err

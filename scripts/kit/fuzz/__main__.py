"""`python -m scripts.kit.fuzz nats|zmq`, with Ctrl-C handled from the first moment."""

from __future__ import annotations

import argparse
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules load nothing runs yet
    from scripts.kit.fuzz import nats, zmq

    parser = argparse.ArgumentParser(prog="python -m scripts.kit.fuzz")
    commands = parser.add_subparsers(required=True, metavar="nats|zmq")
    for name, command in {"nats": nats, "zmq": zmq}.items():
        text = (command.__doc__ or "").split("\n\n")[0]
        own = commands.add_parser(name, help=text.splitlines()[0], description=command.__doc__)
        command.add_flags(own)
        own.set_defaults(main=command.main)
    flags = parser.parse_args()
    sys.exit(flags.main(flags))

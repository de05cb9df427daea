"""Settings of a command, declared once: flags, environment variables, one TOML file, help and docs follow.

    class FrontendOptions(Settings):                kvrouter frontend --port 9000
        port: int = setting(8000, "port", …)        KVROUTER_PORT=9000
                                                    [frontend]
                                                    port = 9000

declare.py: what a setting is (pure; the core's settings use it). read.py: values and where each came from.
pages.py: help and --show-config. commands.py: where each command declares its settings.
"""

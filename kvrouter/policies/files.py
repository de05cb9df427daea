"""The settings that name a file or a class: --router-config, --router-policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvrouter.errors import ConfigError
from kvrouter.policies import PolicySettings
from kvrouter.policies.endpoint_picker import EndpointPicker, load_endpoint_picker
from kvrouter.policies.importing import GuardedPolicies, load_custom_policy
from kvrouter.settings.declare import Implied, Settings, setting

SCORED = "scored"


def read_endpoint_picker_file(path: Path) -> EndpointPicker:
    """Raises ConfigError."""
    try:
        return load_endpoint_picker(path.read_text())
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        # a UnicodeDecodeError quotes a byte of the file, which may have a token
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise ConfigError(f"--router-config {path}: {getattr(error, 'strerror', None) or reason}") from None


def implied(path: Path) -> Sequence[Implied]:
    """The mode, and the settings that the file's indexerConfig has, too. Raises ConfigError."""
    return (Implied("router-mode", SCORED, "kind"), *read_endpoint_picker_file(path).implied)


@dataclass(frozen=True, slots=True)
class PolicyFiles(Settings):
    heading = PolicySettings.heading

    config: Path | None = setting(
        None,
        "an EndpointPickerConfig (YAML): the mode is scored then, unless --router-mode is given",
        name="router-config",
        implies=implied,
        default_text="queue 2, kv-cache-utilization 2, prefix 3",
        reloadable=True,
    )
    policy: str | None = setting(
        None,
        "a custom policy instead of a mode: its class or its entry point (docs/writing-a-policy.md)",
        name="router-policy",
        metavar="MODULE:CLASS",
    )
    policy_arguments: tuple[str, ...] = setting(
        (), "an argument of the custom policy's constructor", name="router-policy-arg", metavar="KEY=VALUE"
    )

    def loaded(self, settings: PolicySettings, mode: str) -> tuple[PolicySettings, tuple[str, ...]]:
        """The settings with what the files say, and notes about parts without effect. Raises ConfigError.

        `mode`: the mode of the command, which may be another one than the files are for.
        """
        picker = read_endpoint_picker_file(self.config) if self.config is not None else None
        scored = picker.policy if picker is not None else None
        settings = replace(settings, scored=scored, custom=self._custom_policies())
        return settings, self._notes(picker, mode)

    def _custom_policies(self) -> GuardedPolicies | None:
        if self.policy is not None:
            return load_custom_policy(self.policy, self.policy_arguments)
        if self.policy_arguments:
            raise ConfigError("--router-policy-arg needs --router-policy")
        return None

    def _notes(self, picker: EndpointPicker | None, mode: str) -> tuple[str, ...]:
        if picker is None:
            return ()
        named = ", ".join(f"--{one.name}" for one in picker.implied)
        notes = (*([f"the file has defaults of {named}"] if named else []), *picker.notes)
        if mode == SCORED and self.policy is None:
            return notes
        # Not an error: one request may still name mode scored.
        own = self.policy or mode
        return (*notes, f"the mode is {own}: only requests with mode scored use this file")

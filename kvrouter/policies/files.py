"""The settings that name a file or a class: --router-config, --router-policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvrouter.errors import ConfigError
from kvrouter.policies import PolicySettings
from kvrouter.policies.endpoint_picker import EndpointPicker, load_endpoint_picker
from kvrouter.policies.importing import GuardedPolicies, load_custom_policy
from kvrouter.settings.declare import Settings, setting


@dataclass(frozen=True, slots=True)
class PolicyFiles(Settings):
    heading = PolicySettings.heading

    config: Path | None = setting(
        None,
        "scored: an EndpointPickerConfig (YAML)",
        name="router-config",
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
        picker = self._endpoint_picker()
        scored = picker.policy if picker is not None else None
        settings = replace(settings, scored=scored, custom=self._custom_policies())
        return settings, self._notes(picker, mode)

    def _custom_policies(self) -> GuardedPolicies | None:
        if self.policy is not None:
            return load_custom_policy(self.policy, self.policy_arguments)
        if self.policy_arguments:
            raise ConfigError("--router-policy-arg needs --router-policy")
        return None

    def _endpoint_picker(self) -> EndpointPicker | None:
        if self.config is None:
            return None
        try:
            return load_endpoint_picker(self.config.read_text())
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--router-config {self.config}: {reason}") from error

    def _notes(self, picker: EndpointPicker | None, mode: str) -> tuple[str, ...]:
        if picker is None:
            return ()
        if mode == "scored" and self.policy is None:
            return picker.notes
        # Not an error: one request may still name mode scored.
        own = self.policy or mode
        return (*picker.notes, f"the mode is {own}: only requests with mode scored use this file")

"""Which shape of message content a chat template expects: a string, or a list of parts.

The same conversation renders differently in each shape, so this must decide as vLLM does: from the template's
syntax tree (vLLM's `--chat-template-content-format auto`). A template expects parts if it loops over them:

    {% for message in messages %}{% for part in message.content %}        directly, or
    {% macro show(body) %}{% for part in body %}  ...  {{ show(message.content) }}   in a macro, or
    {% set content = message.content %}{% for part in content %}          under this very name

The messages may have another name. From 0.33 on, vLLM also follows them into a namespace:

    {% set rest = messages[1:] %}{% for message in rest %}
    {% set ns = namespace(rest=messages) %}{% for message in ns.rest %}   before 0.33: strings
"""

from __future__ import annotations

from collections.abc import Set
from typing import TypeGuard

from jinja2 import nodes


class _NotANameError(Exception):
    """The template unpacks messages, or a part of one, into several variables; vLLM then uses strings."""


def wants_parts(template: nodes.Template, *, follows_namespaces: bool = True) -> bool:
    """Whether the template loops over the parts of a message's content.

    `follows_namespaces`: as vLLM from 0.33 on. Before, messages in a namespace made it use strings.
    """
    try:
        return _loops_over_content(template, _message_names(template, follows_namespaces))
    except _NotANameError:
        return False


def _loops_over_content(template: nodes.Template, messages: Set[str]) -> bool:
    # nodes have no hash by identity and no link to their parent, hence the ids
    inside = {
        id(loop): macro for macro in template.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)
    }
    for loop in template.find_all(nodes.For):
        macro = inside.get(id(loop))
        names = _content_parameters(template, macro, messages) if macro else {"content"}
        is_named = isinstance(loop.iter, nodes.Name) and loop.iter.name in names
        if is_named or _is_content(loop.iter, messages):
            return bool(_name(loop.target))  # called for what it raises: no name is empty
    return False


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: Set[str]) -> set[str]:
    """The parameters of `macro` that receive a message's content in at least one call."""
    names = [parameter.name for parameter in macro.args]
    filled = set()
    for call in template.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        values = [*zip(names, call.args, strict=False), *((pair.key, pair.value) for pair in call.kwargs)]
        filled |= {name for name, value in values if name in names and _is_content(value, messages)}
    return filled


def _message_names(template: nodes.Template, follows_namespaces: bool) -> set[str]:
    """The loop variables that each hold one message."""
    lists = _names_of_messages(template, follows_namespaces)
    loops = template.find_all(nodes.For)
    return {_name(loop.target) for loop in loops if _is_variable(loop.iter, lists)}


def _names_of_messages(template: nodes.Template, follows_namespaces: bool) -> set[str]:
    """`messages`, and the variables to which it, or a slice of it, is assigned; `ns.rest` in a namespace."""
    assignments = list(template.find_all(nodes.Assign))
    names_of = _names_given if follows_namespaces else _name_given
    names = {"messages"}
    while found := {name for each in assignments for name in names_of(each, names)} - names:
        names |= found
    return names


def _name_given(assignment: nodes.Assign, names: Set[str]) -> list[str]:
    """The name that an assignment gives to the messages, by the rule before 0.33."""
    return [_name(assignment.target)] if _is_variable(assignment.node, names) else []


def _names_given(assignment: nodes.Assign, names: Set[str]) -> list[str]:
    """The same from 0.33 on. Messages that are unpacked into several variables get no name."""
    target, value = assignment.target, assignment.node
    if _is_variable(value, names):
        if isinstance(target, nodes.NSRef):
            return [f"{target.name}.{target.attr}"]
        return [target.name] if isinstance(target, nodes.Name) else []
    if isinstance(target, nodes.Name) and _is_namespace(value):
        return [f"{target.name}.{pair.key}" for pair in value.kwargs if _is_variable(pair.value, names)]
    return []


def _is_namespace(node: nodes.Node) -> TypeGuard[nodes.Call]:
    called = node.node if isinstance(node, nodes.Call) else None
    return isinstance(called, nodes.Name) and called.name == "namespace"


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _NotANameError
    return target.name


def _is_variable(node: nodes.Node, names: Set[str]) -> bool:
    node = _unwrapped(node)
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return node.node.ctx == "load" and f"{node.node.name}.{node.attr}" in names
    return _is_plain_variable(node, names)


def _is_content(node: nodes.Node, messages: Set[str]) -> bool:
    node = _unwrapped(node)
    if isinstance(node, nodes.Getattr) and node.attr == "content":
        return _is_plain_variable(node.node, messages)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content":
        return _is_plain_variable(node.node, messages)
    return False


def _is_plain_variable(node: nodes.Node, names: Set[str]) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


def _unwrapped(node: nodes.Node) -> nodes.Node:
    """`node` without filters, tests and slices: `messages[1:] | list` still means the messages."""
    if isinstance(node, nodes.Filter | nodes.Test) and node.node is not None:
        return _unwrapped(node.node)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _unwrapped(node.node)
    return node

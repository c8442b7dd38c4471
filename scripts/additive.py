"""Compare the CRDs with those of the last landing: an upgrade may lose nothing that is stored and refuse nothing that was valid.

    scripts/additive.py [--record]

It prints what goes, changes or tightens, and exits with 1. Additions pass, but for a field of a spec with a default. The line of what is
looser though this program can't see it (a pattern, a rule) goes into tests/recorded/crds/looser.yaml, with the reason. --record makes this
version the last landing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CRDS = ROOT / "manifests/crds"
RECORDED = ROOT / "tests/recorded/crds"
LOOSER = "looser.yaml"
Schema = dict[str, Any]

MAY_GO = ("pattern", "format", "multipleOf", "uniqueItems", "not", "anyOf", "oneOf", "allOf", "exclusiveMinimum", "exclusiveMaximum")
MAY_COME = ("nullable", "x-kubernetes-preserve-unknown-fields")
STAYS = ("type", *(f"x-kubernetes-{key}" for key in ("int-or-string", "embedded-resource", "list-type", "list-map-keys", "map-type")))
LOWER = ("minimum", "minLength", "minItems", "minProperties")
UPPER = ("maximum", "maxLength", "maxItems", "maxProperties")


def changes(old: Schema, new: Schema, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, words) of each way in which a value that `old` takes would be dropped, read otherwise or refused under `new`."""
    if "enum" in old and "enum" not in new:
        old = {**old, "maxLength": max(len(str(value)) for value in old["enum"])}
    for key in (*STAYS, *MAY_GO, *MAY_COME, *LOWER, *UPPER):
        if old.get(key) != new.get(key) and not _is_looser(key, old.get(key), new.get(key)):
            yield path, f"{key} {old.get(key, 'unset')} became {new.get(key, 'unset')}"
    if "enum" in new:
        yield from ((path, f"value {value} goes") for value in old.get("enum", ["of any other kind"]) if value not in new["enum"])
    if "default" in old:
        yield from ((path, words) for words in _default(old["default"], new.get("default")))
    yield from ((path, f"{name} is required now") for name in new.get("required", ()) if name not in old.get("required", ()))
    rules = [[rule["rule"] for rule in schema.get("x-kubernetes-validations", ())] for schema in (old, new)]
    yield from ((path, f"rule {rule} is new") for rule in rules[1] if rule not in rules[0])
    yield from _inner(old, new, path)


def _is_looser(key: str, old: Any, new: Any) -> bool:
    if key in LOWER or key in UPPER:
        return new is None or (old is not None and (new < old) == (key in LOWER))
    return not new if key in MAY_GO else key in MAY_COME and not old


def _default(old: Any, new: Any) -> Iterator[str]:
    """An object's default is made of those of its fields, so it may grow."""
    if isinstance(old, dict) and isinstance(new, dict):
        yield from (words for key, value in old.items() for words in _default(value, new.get(key)))
    elif type(old) is not type(new) or old != new:
        yield f"default {old} became {'unset' if new is None else new}"


def _inner(old: Schema, new: Schema, path: str) -> Iterator[tuple[str, str]]:
    before, after = old.get("properties", {}), new.get("properties", {})
    for name, schema in before.items():
        yield from changes(schema, after[name], f"{path}.{name}") if name in after else [(f"{path}.{name}", "field goes")]
    if path.startswith(".spec"):  # else the API server fills it in, and the version before refuses every job after a rollback
        yield from (
            (f"{path}.{name}", "field is new and has a default") for name, new in after.items() if name not in before and "default" in new
        )
    if old.get("x-kubernetes-preserve-unknown-fields"):
        yield from ((f"{path}.{name}", "field is new where any value was taken") for name in after if name not in before)
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if key in old:
            yield from changes(old[key], new[key], path + mark) if key in new else [(path + mark, f"{key} goes")]


def losses(old: Schema, new: Schema) -> Iterator[str]:
    """Losses of a CRD, a line each; `new` is empty if it goes."""
    name, before, after = old["metadata"]["name"], old["spec"], new.get("spec", {})
    if any(before[key] != after.get(key) for key in ("group", "scope", "names")):
        yield f"{name}: its group, scope or names changed, or it goes"
    served = {version["name"]: version for version in after.get("versions", ()) if version["served"]}
    for version in (version for version in before["versions"] if version["served"]):
        title = f"{name} {version['name']}"
        if (now := served.get(version["name"])) is None:
            yield f"{title}: is not served any more"
            continue
        yield from (f"{title}: subresource {one} goes" for one in version.get("subresources", ()) if one not in now.get("subresources", ()))
        schemas = (one["schema"]["openAPIV3Schema"] for one in (version, now))
        yield from (f"{title} {path or '.'}: {words}" for path, words in changes(*schemas))


def differences(crds: Path = CRDS, recorded: Path = RECORDED) -> list[str]:
    """Lines of all CRDs without those that LOOSER names, and the lines of LOOSER that name nothing."""
    old, new = ({path.name: yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))} for folder in (recorded, crds))
    reasons: dict[str, str] = old.pop(LOOSER, {})
    lines = [line for name, crd in old.items() for line in losses(crd, new.get(name, {}))]
    return [line for line in lines if line not in reasons] + [f"{LOOSER}: no change is: {line}" for line in reasons if line not in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        (RECORDED / LOOSER).unlink(missing_ok=True)
        for path in CRDS.glob("*.yaml"):
            (RECORDED / path.name).write_text(path.read_text())
        return 0
    if lines := differences():
        print(*lines, "An upgrade would lose or refuse these (CONTRIBUTING, Versions).", sep="\n", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

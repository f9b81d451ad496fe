"""Group kinds: one small file each behind the ``GroupRules`` protocol."""

from hitproof.model.groups.group import MODELLED_KINDS, Group, GroupRules, cdiv, rules_of, whole_number

__all__ = ["MODELLED_KINDS", "Group", "GroupRules", "cdiv", "rules_of", "whole_number"]

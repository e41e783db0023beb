"""Which tokens are allowed and preferred.

logit_rules  forbidden tokens and penalties, from the settings of a request
constraints  regular expressions, JSON schemas, grammars and choices
"""

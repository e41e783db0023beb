"""Every refusal in these tests has the user's words."""

from support.refusal_words import refusals_have_the_users_words  # noqa: F401

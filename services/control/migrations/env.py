"""Alembic's entry: runs the steps in `versions` on the connection that the store hands over.

A change of `services.control.tables` needs a new step; a test compares the two.
"""

from alembic import context

from services.control.tables import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
with context.begin_transaction():
    context.run_migrations()

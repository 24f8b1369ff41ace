"""Tables, figures and the page, from the records of a store."""

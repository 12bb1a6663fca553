"""The API's document, made of the structs that requests become and answers are made of."""

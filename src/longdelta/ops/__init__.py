"""The stages in order, what is kept between them, and the two operators torch sees."""

# Makes doxygen read our headers (docs/conf.py): the comment at the top describes the file, what is
# indented in a comment is code, and digits are not separated.
1s,^///,/// @file\n///,
s,^ *///   *,&  ,
s,\([0-9]\)'\([0-9]\),\1\2,g

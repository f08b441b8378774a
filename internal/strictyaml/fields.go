package strictyaml

import (
	"fmt"
	"iter"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v4"
)

// Field is one field of a map in the file, or an element of a list, which has neither Name nor Key. To read the zero
// Field returns nothing and reports nothing.
type Field struct {
	Name string
	Path string // such as "policies[0].window"
	Key  *yaml.Node
	Node *yaml.Node // the value, with aliases followed; nil: there is none, which has been reported
}

// Given reports whether the map has the field.
func (f Field) Given() bool { return f.Key != nil }

// Fields is a map in the file.
type Fields struct {
	Path string
	At   *yaml.Node // the map
	List []Field
}

// Field returns the field of a name, or the zero Field.
func (f Fields) Field(name string) Field {
	if i := slices.IndexFunc(f.List, func(one Field) bool { return one.Name == name }); i >= 0 {
		return f.List[i]
	}
	return Field{}
}

// Only returns the fields with one of the names.
func (f Fields) Only(names ...string) []Field {
	return slices.DeleteFunc(slices.Clone(f.List), func(one Field) bool { return !slices.Contains(names, one.Name) })
}

// Decoder reads values from the nodes of a file and collects mistakes. It is not safe for concurrent use.
type Decoder struct {
	Mistakes
	// Plain takes a number, a date or a truth value where text must be, as it is written.
	Plain bool
	// Secret keeps values out of the messages of Text, maps and lists.
	Secret bool

	root *yaml.Node
	// budget is how many more elements of maps and lists may be visited. A file has fewer elements than bytes, so only
	// aliases to aliases can use it up.
	budget int
}

// New reads the one YAML document in data; file is its name in mistakes.
func New(file string, data []byte) *Decoder {
	d := &Decoder{Mistakes: Mistakes{File: file}, budget: len(data) + aliasBudget}
	d.root = read(data, &d.Mistakes)
	return d
}

// Root returns the root of the document. It has no Node when the document is empty, or could not be read, which has
// been reported.
func (d *Decoder) Root() Field {
	if d.root == nil || d.root.Kind == yaml.ScalarNode && d.root.Tag == "!!null" {
		return Field{}
	}
	return Field{Node: d.root}
}

// aliasBudget is how many elements aliases may add to those of the file.
const aliasBudget = 1 << 20

// Fail reports a mistake at a node. That there is no node has been reported (see Field), and only counts.
func (d *Decoder) Fail(n *yaml.Node, path, format string, args ...any) {
	if n == nil {
		d.count++
		return
	}
	d.Add(n.Line, n.Column, path, fmt.Sprintf(format, args...))
}

// visit counts an element, and reports whether reading may go on.
func (d *Decoder) visit(n *yaml.Node, path string) bool {
	if d.budget == 0 {
		d.Fail(n, path, "aliases repeat too much of the file: write fewer of them")
	}
	d.budget--
	return d.budget >= 0 && !d.Full()
}

// empty reports whether a field has no value to read.
func (d *Decoder) empty(f Field) bool {
	if f.Node == nil && f.Given() {
		d.count++
	}
	return f.Node == nil
}

// Value follows an alias. An alias never leads to another alias.
func Value(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// Kind describes a node, for messages.
func Kind(n *yaml.Node) string {
	words := ""
	switch {
	case n.Kind == yaml.MappingNode:
		words = "a map"
	case n.Kind == yaml.SequenceNode:
		words = "a list"
	case n.Tag == "!!str":
		words = "the text " + Show(n.Value)
	case n.Tag == "!!int", n.Tag == "!!float":
		words = "the number " + Shorten(n.Value)
	case n.Tag == "!!null":
		words = "nothing"
	default:
		words = Show(n.Value)
	}
	if n.Style&yaml.TaggedStyle != 0 {
		words += " tagged " + Shorten(n.Tag)
	}
	return words
}

func (d *Decoder) kind(n *yaml.Node) string {
	if d.Secret && n.Kind == yaml.ScalarNode && n.Tag != "!!null" {
		return "what stands here"
	}
	return Kind(n)
}

// Fields reads a map. known are the names that its fields may have; none: any name. Fields in empty may have no value,
// and are then left out.
func (d *Decoder) Fields(at Field, known []string, empty ...string) (Fields, bool) {
	n, path := at.Node, at.Path
	f := Fields{Path: path, At: n}
	if d.empty(at) {
		return f, false
	}
	if n.Kind != yaml.MappingNode || n.Tag != "!!map" {
		of := ""
		if len(known) > 0 {
			of = " of fields (" + known[0] + ", …)"
		}
		d.Fail(n, path, "must be a map%s, not %s", of, d.kind(n))
		return f, false
	}
	for i := 0; i < len(n.Content); i += 2 {
		key, at := Value(n.Content[i]), n.Content[i]
		if !d.visit(at, path) {
			return f, false
		}
		if key.Kind != yaml.ScalarNode {
			d.Fail(at, path, "a field's name must be text, not %s", d.kind(key))
			continue
		}
		one := Field{Name: key.Value, Path: Join(path, clip(key.Value)), Key: at, Node: Value(n.Content[i+1])}
		if len(known) > 0 && !slices.Contains(known, one.Name) {
			d.Fail(at, one.Path, "unknown field%s", suggestion(one.Name, known))
			continue
		}
		if earlier := f.Field(one.Name); earlier.Given() {
			d.Fail(at, one.Path, "is given twice, first on line %d: remove one", earlier.Key.Line)
			continue
		}
		if one.Node.Tag == "!!null" {
			if slices.Contains(empty, one.Name) {
				continue
			}
			d.Fail(at, one.Path, "has no value: give it one or remove the field")
			one.Node = nil
		}
		f.List = append(f.List, one)
	}
	return f, true
}

// Maps reads a list of maps, each as by Fields. It reports elements that are no maps, and leaves them out.
func (d *Decoder) Maps(f Field, of string, known []string, empty ...string) iter.Seq[Fields] {
	return func(yield func(Fields) bool) {
		for one := range d.Elements(f, of) {
			if fields, ok := d.Fields(one, known, empty...); ok && !yield(fields) {
				return
			}
		}
	}
}

// Elements reads a list.
func (d *Decoder) Elements(f Field, of string) iter.Seq[Field] {
	return func(yield func(Field) bool) {
		if d.empty(f) {
			return
		}
		if f.Node.Kind != yaml.SequenceNode || f.Node.Tag != "!!seq" {
			d.Fail(f.Node, f.Path, "must be a list of %s, not %s", of, d.kind(f.Node))
			return
		}
		for i, n := range f.Node.Content {
			one := Field{Path: Element(f.Path, i), Node: Value(n)}
			if !d.visit(n, one.Path) || !yield(one) {
				return
			}
		}
	}
}

// Required returns the field of a name. If there is none, it reports that, and returns the zero Field.
func (d *Decoder) Required(f Fields, name, example string) Field {
	one := f.Field(name)
	if !one.Given() {
		d.Fail(f.At, Join(f.Path, name), "is missing: add it, such as %s: %s", name, example)
	}
	return one
}

// Scalar returns the text of a value that has one of the tags. what describes the values that may stand there, for the
// message.
func (d *Decoder) Scalar(f Field, what string, tags ...string) (string, bool) {
	if d.empty(f) {
		return "", false
	}
	if f.Node.Kind != yaml.ScalarNode || !slices.Contains(tags, f.Node.Tag) {
		d.Fail(f.Node, f.Path, "must be %s, not %s", what, d.kind(f.Node))
		return "", false
	}
	return f.Node.Value, true
}

// PlainTags are the tags of what Decoder.Plain takes as text.
var PlainTags = []string{"!!int", "!!float", "!!bool", "!!timestamp"}

// Text reads a text of lowest to highest bytes. A value that YAML takes for a number, a date or a truth value must be
// quoted, because YAML may have changed it: 0x10, 1e3 and 010 are not what was written.
func (d *Decoder) Text(f Field, lowest, highest int) (string, bool) {
	tags := []string{"!!str"}
	if d.Plain && f.Node != nil && f.Node.Style&yaml.TaggedStyle == 0 {
		tags = append(tags, PlainTags...)
	}
	text, ok := d.Scalar(f, "text, in quotes if need be", tags...)
	if ok && (len(text) < lowest || len(text) > highest) {
		d.Fail(f.Node, f.Path, "must have %d to %d bytes, and has %d", lowest, highest, len(text))
		ok = false
	}
	return text, ok
}

// Integer reads a whole number from lowest to highest. A quoted number is a mistake.
func (d *Decoder) Integer(f Field, lowest, highest int64) int64 {
	text, ok := d.Scalar(f, "a whole number", "!!int", "!!float")
	if !ok {
		return 0
	}
	v, err := ParseInteger(text, lowest, highest)
	if err != nil {
		d.Fail(f.Node, f.Path, "%v", err)
	}
	return v
}

// Boolean reads true or false.
func (d *Decoder) Boolean(f Field) bool {
	text, _ := d.Scalar(f, "true or false", "!!bool")
	return strings.EqualFold(text, "true")
}

// Choice reads one of several words.
func (d *Decoder) Choice(f Field, words ...string) string {
	v, ok := d.Text(f, 0, MaxFile)
	if ok && !slices.Contains(words, v) {
		d.Fail(f.Node, f.Path, "must be one of %s, not %s%s", strings.Join(words, ", "), d.kind(f.Node),
			suggestion(v, words))
		return ""
	}
	return v
}

// Join returns the path of a field below another.
func Join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// Element returns the path of an element of a list.
func Element(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }

// clip quotes and shortens an unknown field's name for the path of a mistake.
func clip(name string) string {
	if len(name) > 40 || strings.ContainsFunc(name, func(r rune) bool { return r < ' ' }) {
		return Show(name)
	}
	return name
}

// suggestion returns ": did you mean …?", or "" if no known word is similar.
func suggestion(word string, known []string) string {
	best, least := "", 3
	if len(word) > 32 {
		return ""
	}
	for _, k := range known {
		// The second condition: a word of which half the letters are others is not similar.
		if d := distance(strings.ToLower(word), k); d < least && d < (len(k)+1)/2 {
			best, least = ": did you mean "+k+"?", d
		}
	}
	return best
}

// distance is the number of letters to insert, remove or replace to get from a to b (Levenshtein 1965).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			if a[i] != b[j] {
				diagonal = min(diagonal, row[j], row[j+1]) + 1
			}
			diagonal, row[j+1] = row[j+1], diagonal
		}
	}
	return row[len(b)]
}

// ParseInteger parses a whole decimal number, which may have underscores between digits (1_000_000). Octal, hexadecimal
// and binary numbers of YAML are mistakes, such as a limit of 010.
func ParseInteger(s string, lowest, highest int64) (int64, error) {
	if !IsInteger(s) {
		return 0, fmt.Errorf("must be a whole decimal number, not %s", Show(s))
	}
	v, err := strconv.ParseInt(strings.ReplaceAll(s, "_", ""), 10, 64)
	if err != nil || v < lowest || v > highest {
		return 0, fmt.Errorf("must be from %d to %d, not %s", lowest, highest, Shorten(s))
	}
	return v, nil
}

// IsInteger reports whether s is a whole decimal number.
func IsInteger(s string) bool { return integer.MatchString(s) }

var integer = regexp.MustCompile(`^-?(0|[1-9](_?[0-9])*)$`)

// Show quotes text of a file for a message, and shortens it.
func Show(s string) string { return strconv.Quote(Shorten(s)) }

// Shorten returns the first 40 characters of a longer text.
func Shorten(s string) string {
	const longest = 40
	if runes := []rune(s); len(runes) > longest {
		return string(runes[:longest]) + "…"
	}
	return s
}

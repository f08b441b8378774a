package policy

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/weirlimit/weir/algo"
	"go.yaml.in/yaml/v3"
)

// field is one field of a map in the file.
type field struct {
	name string
	path string // such as "policies[0].window"
	key  *yaml.Node
	node *yaml.Node // the value, aliases followed; nil when there is none, which has been reported
}

// fields is a map in the file.
type fields struct {
	path string
	at   *yaml.Node // the map
	list []field
}

func (f fields) get(name string) (field, bool) {
	for i := range f.list {
		if f.list[i].name == name {
			return f.list[i], true
		}
	}
	return field{}, false
}

func (f fields) has(name string) bool {
	_, ok := f.get(name)
	return ok
}

// only returns the fields among the given names.
func (f fields) only(names []string) []field {
	var list []field
	for _, one := range f.list {
		if slices.Contains(names, one.name) {
			list = append(list, one)
		}
	}
	return list
}

// decoder reads values from the file's nodes and collects what is wrong with them.
type decoder struct {
	mistakes
	// budget is how many more elements of maps and lists may be visited. A file cannot hold more than it has bytes, so
	// only aliases to aliases can use it up.
	budget int
	zones  map[string]*time.Location
}

// aliasBudget is how many elements aliases may add to those that are in the file.
const aliasBudget = 1 << 20

func (d *decoder) fail(n *yaml.Node, path, format string, args ...any) {
	d.add(n.Line, n.Column, path, fmt.Sprintf(format, args...))
}

// visit counts an element and reports whether reading may go on.
func (d *decoder) visit(n *yaml.Node, path string) bool {
	if d.budget == 0 {
		d.fail(n, path, "aliases repeat too much of the file: write fewer of them")
	}
	d.budget--
	return d.budget >= 0 && !d.full()
}

// value follows an alias. What an alias leads to is never one itself.
func value(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// kind words what a node is, for messages.
func kind(n *yaml.Node) string {
	words := ""
	switch {
	case n.Kind == yaml.MappingNode:
		words = "a map"
	case n.Kind == yaml.SequenceNode:
		words = "a list"
	case n.Tag == "!!str":
		words = "the text " + show(n.Value)
	case n.Tag == "!!int", n.Tag == "!!float":
		words = "the number " + shorten(n.Value)
	case n.Tag == "!!null":
		words = "nothing"
	default:
		words = show(n.Value)
	}
	if n.Style&yaml.TaggedStyle != 0 {
		words += " tagged " + shorten(n.Tag)
	}
	return words
}

// fields reads a map whose fields are known by name. Those in empty may be without a value and are then left out.
func (d *decoder) fields(n *yaml.Node, path string, known []string, empty ...string) (fields, bool) {
	f := fields{path: path, at: n}
	if n.Kind != yaml.MappingNode || n.Tag != "!!map" {
		d.fail(n, path, "must be a map of fields (%s, …), not %s", known[0], kind(n))
		return f, false
	}
	for i := 0; i < len(n.Content); i += 2 {
		key, at := value(n.Content[i]), n.Content[i]
		if !d.visit(at, path) {
			return f, false
		}
		if key.Tag == "!!merge" {
			d.fail(at, path, "merge keys (<<) are not supported: write the fields out, or use an alias for a whole value")
			continue
		}
		if key.Kind != yaml.ScalarNode {
			d.fail(at, path, "a field's name must be text, not %s", kind(key))
			continue
		}
		one := field{name: key.Value, path: join(path, key.Value), key: at, node: value(n.Content[i+1])}
		if !slices.Contains(known, one.name) {
			d.fail(at, join(path, clip(one.name)), "unknown field%s", suggestion(one.name, known))
			continue
		}
		if earlier, twice := f.get(one.name); twice {
			d.fail(at, one.path, "is given twice, first on line %d: remove one", earlier.key.Line)
			continue
		}
		if one.node.Tag == "!!null" {
			if slices.Contains(empty, one.name) {
				continue
			}
			d.fail(at, one.path, "has no value: give it one or remove the field")
			one.node = nil
		}
		f.list = append(f.list, one)
	}
	return f, true
}

// items reads a list.
func (d *decoder) items(f field, of string) ([]*yaml.Node, bool) {
	if f.node == nil {
		return nil, false
	}
	if f.node.Kind != yaml.SequenceNode || f.node.Tag != "!!seq" {
		d.fail(f.node, f.path, "must be a list of %s, not %s", of, kind(f.node))
		return nil, false
	}
	return f.node.Content, true
}

func (d *decoder) missing(f fields, name, example string) {
	d.fail(f.at, join(f.path, name), "is missing: add it, such as %s: %s", name, example)
}

// text reads a string. What YAML takes for a number, a date or a truth value must be quoted, since it may have been
// changed on the way: 0x10, 1e3 and 010 are not what was written.
func (d *decoder) text(f field) (string, bool) {
	n := f.node
	if n == nil {
		return "", false
	}
	if n.Kind == yaml.ScalarNode && n.Tag == "!!str" {
		return n.Value, true
	}
	hint := ""
	if n.Kind == yaml.ScalarNode && n.Style&yaml.TaggedStyle == 0 {
		hint = ": quote it, as in " + show(n.Value)
	}
	d.fail(n, f.path, "must be text, not %s%s", kind(n), hint)
	return "", false
}

// integer reads a whole number. Quoted ones are text.
func (d *decoder) integer(f field, lowest, highest int64) (int64, bool) {
	n := f.node
	if n == nil {
		return 0, false
	}
	if n.Kind != yaml.ScalarNode || n.Tag != "!!int" && n.Tag != "!!float" {
		hint := ""
		if n.Kind == yaml.ScalarNode && n.Tag == "!!str" && isInteger(n.Value) {
			hint = ": remove the quotes"
		}
		d.fail(n, f.path, "must be a whole number, not %s%s", kind(n), hint)
		return 0, false
	}
	v, err := parseInteger(n.Value, lowest, highest)
	if err != nil {
		d.fail(n, f.path, "%v", err)
	}
	return v, err == nil
}

// The sizes that a file can give, in bytes.
const (
	minSize = 64 << 10
	maxSize = 1 << 50
)

// size reads an amount of memory: text such as 64MiB, or a number of bytes.
func (d *decoder) size(f field) (int64, bool) {
	n := f.node
	if n == nil {
		return 0, false
	}
	if n.Kind != yaml.ScalarNode || n.Tag != "!!str" && n.Tag != "!!int" {
		d.fail(n, f.path, "must be an amount of memory such as 64MiB, not %s", kind(n))
		return 0, false
	}
	v, err := humanize.ParseBytes(n.Value)
	if err != nil || v < minSize || v > maxSize {
		d.fail(n, f.path, "%s is not an amount of memory from 64KiB to 1PiB, such as 64MiB", show(n.Value))
		return 0, false
	}
	return int64(v), true
}

func (d *decoder) boolean(f field) (v, ok bool) {
	n := f.node
	if n == nil {
		return false, false
	}
	if n.Kind != yaml.ScalarNode || n.Tag != "!!bool" {
		d.fail(n, f.path, "must be true or false, not %s", kind(n))
		return false, false
	}
	return strings.EqualFold(n.Value, "true"), true
}

// choice reads one of several words.
func (d *decoder) choice(f field, words ...string) (string, bool) {
	v, ok := d.text(f)
	if ok && !slices.Contains(words, v) {
		d.fail(f.node, f.path, "must be one of %s, not %s%s", strings.Join(words, ", "), show(v), suggestion(v, words))
		return "", false
	}
	return v, ok
}

// duration reads a window or a ttl.
func (d *decoder) duration(f field) (time.Duration, bool) {
	n := f.node
	if n == nil {
		return 0, false
	}
	if n.Kind != yaml.ScalarNode || n.Tag != "!!str" {
		d.fail(n, f.path, "must be a duration, not %s: %s", kind(n), durationHint)
		return 0, false
	}
	text := n.Value
	v, err := ParseDuration(text)
	if err == nil {
		err = checkWindow(v)
	} else if _, period := algo.ParsePeriod(text); period {
		err = fmt.Errorf("%q is a calendar period: add align: calendar to a fixed_window, or write a duration such as 24h", text)
	}
	if err != nil {
		d.fail(n, f.path, "%v", err)
	}
	return v, err == nil
}

// zone reads a time zone. UTC becomes nil, the one way to say it in a limit; a file that names a zone a thousand times
// holds it once.
func (d *decoder) zone(f field) (*time.Location, bool) {
	name, ok := d.text(f)
	if !ok {
		return nil, false
	}
	if zone, known := d.zones[name]; known {
		return zone, true
	}
	zone, err := ParseTimeZone(name)
	if err != nil {
		d.fail(f.node, f.path, "%v", err)
		return nil, false
	}
	if zone == time.UTC {
		zone = nil
	}
	if d.zones == nil {
		d.zones = make(map[string]*time.Location)
	}
	d.zones[name] = zone
	return zone, true
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func element(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }

// clip keeps an unknown field's name from filling the path of a mistake.
func clip(name string) string {
	if len(name) > 40 || strings.ContainsFunc(name, func(r rune) bool { return r < ' ' }) {
		return show(name)
	}
	return name
}

// otherNames maps what other limiters call a field to its name here.
func otherName(name string) string {
	switch strings.ToLower(name) {
	case "rate", "requests", "max", "quota":
		return "limit"
	case "interval", "period", "duration", "per":
		return "window"
	case "burst", "max_burst":
		return "capacity"
	case "lease", "lease_ttl":
		return "ttl"
	case "timezone", "tz", "zone":
		return "time_zone"
	}
	return ""
}

// suggestion is ": did you mean …?" when there is something to suggest.
func suggestion(word string, known []string) string {
	best, least := "", 3
	if len(word) > 2*maxWord {
		return ""
	}
	if other := otherName(word); slices.Contains(known, other) {
		best, least = other, 0
	}
	for _, k := range known {
		// Words of which nothing is left are not alike.
		if d := distance(strings.ToLower(word), k); d < least && d < len(k)/2+1 {
			best, least = k, d
		}
	}
	if best == "" {
		return ""
	}
	return ": did you mean " + best + "?"
}

// maxWord is above the length of every field and word there is.
const maxWord = 16

// distance is the number of letters to insert, remove, replace or swap with their neighbour to get from a to b.
func distance(a, b string) int {
	var before, last, row [maxWord*2 + 1]int
	for j := range len(b) + 1 {
		last[j] = j
	}
	for i := range len(a) {
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(last[j]+cost, last[j+1]+1, row[j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], before[j-1]+1)
			}
		}
		before, last = last, row
	}
	return last[len(b)]
}

// Package strictyaml reads YAML files that people write. It reports every mistake with line and column, and rejects
// unknown fields, repeated fields, and values whose type YAML has guessed. It does not decode into Go values: its users
// ask for the fields that they know. Merge keys, second documents and files above MaxFile are mistakes.
package strictyaml

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

const (
	// MaxFile is the size of the largest file that is read, in bytes.
	MaxFile = 16 << 20
	// maxLocate bounds the files in which locate looks for a syntax error, which takes two seconds at most then.
	maxLocate = 512 << 10
)

// read returns the root of the one document in data; nil: it is empty. It adds mistakes to m.
func read(data []byte, m *Mistakes) *yaml.Node {
	byteOrderMark := func(mark string) bool { return bytes.HasPrefix(data, []byte(mark)) }
	switch {
	case len(data) > MaxFile:
		m.Add(1, 1, "", fmt.Sprintf("the file is too large: %d bytes, where %d are allowed", len(data), MaxFile))
		return nil
	case byteOrderMark("\xef\xbb\xbf"):
		m.Add(1, 1, "", "the file begins with a byte order mark: save it as UTF-8 without one")
		return nil
	case byteOrderMark("\xff\xfe"), byteOrderMark("\xfe\xff"):
		m.Add(1, 1, "", "the file is in UTF-16: save it as UTF-8")
		return nil
	case !utf8.Valid(data):
		line, column := Position(data, invalidOffset(data))
		m.Add(line, column, "", "the file is not valid UTF-8 here: save it as UTF-8")
		return nil
	}
	root, second, err := decodeYAML(data)
	if err != nil {
		line, column, message := describe(data, err)
		m.Add(line, column, "", message)
		return nil
	}
	if second != nil {
		m.Add(second.Line, second.Column, "", "a second YAML document begins here: put all into one")
		return nil
	}
	if root == nil || len(root.Content) == 0 {
		return nil
	}
	return root.Content[0]
}

// decodeYAML returns the first document and, if there is one, the second.
func decodeYAML(data []byte) (first, second *yaml.Node, err error) {
	// A malformed file must not end a process that reads it again, even if the YAML library panics.
	defer func() {
		if r := recover(); r != nil {
			first, second, err = nil, nil, fmt.Errorf("the parser gave up: %v", r)
		}
	}()
	d := yaml.NewDecoder(bytes.NewReader(data))
	documents := [2]*yaml.Node{}
	for i := range documents {
		n := new(yaml.Node)
		if err := d.Decode(n); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, nil, err
		}
		documents[i] = n
	}
	return documents[0], documents[1], nil
}

// yamlPlace matches the beginning of the YAML library's messages.
var yamlPlace = regexp.MustCompile(`^(?:yaml: )?(?:line ([0-9]+): )?`)

// describe returns the position and the message of a syntax error.
func describe(data []byte, err error) (line, column int, message string) {
	text := err.Error()
	message = text[len(yamlPlace.FindString(text)):]
	offset, found := locate(data, text)
	if !found {
		// The library's line is where the construct began that it could not finish, sometimes the line before.
		line, _ = strconv.Atoi(yamlPlace.FindStringSubmatch(text)[1])
		last, _ := Position(data, len(data))
		line = min(max(line, 1), last)
		return line, 1, "is not valid YAML near here: " + message
	}
	if strings.HasPrefix(message, "unknown anchor") {
		offset = bytes.LastIndexByte(data[:offset+1], '*')
	}
	line, column = Position(data, offset)
	if data[offset] == '\t' {
		return line, column, "a tab cannot indent YAML: use spaces"
	}
	return line, column, "is not valid YAML: " + message
}

// locate returns the offset of the character at which reading data begins to fail with this message. The library gives
// a line at best, and in half of its messages a wrong one. But it reads from the front, so the shortest beginning of
// the file that fails with the same message ends at the wrong character.
func locate(data []byte, message string) (offset int, found bool) {
	if len(data) > maxLocate {
		return 0, false
	}
	fails := func(n int) bool {
		_, _, err := decodeYAML(data[:n])
		return err != nil && err.Error() == message
	}
	// A beginning that ends inside a construct may fail with the same message by chance, so this may not find the very
	// shortest one. What it finds fails, and does not fail without its last character.
	n := 1 + sort.Search(len(data)-1, func(i int) bool { return fails(i + 1) })
	if n > len(data) || !fails(n) {
		return 0, false
	}
	offset = n - 1
	for offset > 0 && !utf8.RuneStart(data[offset]) {
		offset--
	}
	return offset, true
}

func invalidOffset(data []byte) int {
	for i, r := range string(data) {
		if r == utf8.RuneError && !bytes.HasPrefix(data[i:], []byte("\ufffd")) {
			return i
		}
	}
	return len(data)
}

// Position returns the line and column of an offset, in characters. Lines end in a line feed.
func Position(data []byte, offset int) (line, column int) {
	before := data[:offset]
	return 1 + bytes.Count(before, []byte{'\n'}), 1 + utf8.RuneCount(before[bytes.LastIndexByte(before, '\n')+1:])
}

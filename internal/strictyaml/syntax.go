// Package strictyaml reads YAML files that people write. It reports every mistake with line and column, and rejects
// unknown fields, repeated fields, and values whose type YAML has guessed. It does not decode into Go values: its users
// ask for the fields that they know. Merge keys, second documents and files above MaxFile are mistakes.
package strictyaml

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
)

// MaxFile is the size of the largest file that is read, in bytes.
const MaxFile = 16 << 20

// read returns the root of the one document in data; nil: it is empty. It adds mistakes to m.
func read(data []byte, m *Mistakes) *yaml.Node {
	if len(data) > MaxFile {
		m.Add(1, 1, "", fmt.Sprintf("the file is too large: %d bytes, where %d are allowed", len(data), MaxFile))
		return nil
	}
	if bytes.HasPrefix(data, []byte("\xff\xfe")) || bytes.HasPrefix(data, []byte("\xfe\xff")) {
		m.Add(1, 1, "", "the file is in UTF-16: save it as UTF-8")
		return nil
	}
	root, second, err := decodeYAML(data)
	if err != nil {
		line, column, message := describe(data, err)
		m.Add(line, column, "", "is not valid YAML: "+message)
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

// describe returns the position and the message of a syntax error.
func describe(data []byte, err error) (line, column int, message string) {
	at, ok := errors.AsType[*yaml.LoadError](err)
	if !ok {
		return 1, 1, err.Error()
	}
	line, column, message = at.Mark.Line, at.Mark.Column, at.Message
	if line == 0 { // an error about the bytes, whose index is known
		line, column = Position(data, min(at.Mark.Index, len(data)))
	}
	// The library counts a line after the last one, and knows other ends of lines.
	if last, end := Position(data, len(data)); line > last {
		line, column = last, end
	}
	if at.ContextMark.Line != 0 {
		message += fmt.Sprintf(" %s that begins in line %d", at.ContextMsg, at.ContextMark.Line)
	}
	return line, column, message
}

// Position returns the line and column of an offset, in characters. Lines end in a line feed.
func Position(data []byte, offset int) (line, column int) {
	before := data[:offset]
	return 1 + bytes.Count(before, []byte{'\n'}), 1 + utf8.RuneCount(before[bytes.LastIndexByte(before, '\n')+1:])
}

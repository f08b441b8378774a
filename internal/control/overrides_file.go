package control

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"syscall"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/internal/strictyaml"
)

// OverridesFile is the name of a book's file in the data directory.
const OverridesFile = "overrides.json"

// maxFile bounds a file: twice what a Book can hold, because people may write it with more spaces.
const maxFile = 2 * (2*MaxBytes + MaxDeletedBytes)

// fileFormat is the version of the format below.
const fileFormat = 1

// fileBody is the content of a file, and of the message between members. Each override has its own line.
type fileBody struct {
	Format    int         `json:"format"`
	Overrides fileEntries `json:"overrides"`
}

// fileEntries are read as far as maxEntries: entries without a content would take many times the memory of their text.
type fileEntries []fileEntry

const maxEntries = 2 * (MaxOverrides + MaxDeleted)

// UnmarshalJSONFrom implements json.UnmarshalerFrom.
func (l *fileEntries) UnmarshalJSONFrom(from *jsontext.Decoder) error {
	if k := from.PeekKind(); k != '[' {
		return cmp.Or[error](from.SkipValue(), &json.SemanticError{JSONKind: k, GoType: reflect.TypeFor[[]fileEntry]()})
	}
	_, err := from.ReadToken()
	for err == nil && from.PeekKind() != ']' {
		if len(*l) == maxEntries {
			return fmt.Errorf("more than %d overrides and deletions", maxEntries)
		}
		*l = append(*l, fileEntry{})
		err = json.UnmarshalDecode(from, &(*l)[len(*l)-1])
	}
	if err == nil {
		_, err = from.ReadToken()
	}
	return err
}

type fileEntry struct {
	Policy   string         `json:"policy"`
	Key      string         `json:"key,omitempty"`
	Prefix   string         `json:"prefix,omitempty"`
	Settings jsontext.Value `json:"settings,omitzero"`
	Deleted  bool           `json:"deleted,omitzero"`
	Counter  uint64         `json:"counter"`
	Node     string         `json:"node"`
	By       string         `json:"by,omitempty"`
	At       time.Time      `json:"at"`
}

// OpenDirectory opens a data directory, and makes it if necessary. It locks it for this node until the Closer is
// closed. It fails if no file can be written there, or if another node has locked it. It removes temporary files of an
// earlier process.
func OpenDirectory(name string) (_ io.Closer, err error) {
	if err := os.MkdirAll(name, 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(name, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = lock.Close() // the error of the caller says more
		}
	}()
	// The kernel unlocks it when the process ends, in whatever way.
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s: is the directory of another node that runs", name)
		}
		return nil, fmt.Errorf("%s: %w", lock.Name(), err)
	}
	left, err := filepath.Glob(filepath.Join(name, "."+OverridesFile+"-*"))
	for _, old := range left {
		err = errors.Join(err, os.Remove(old))
	}
	if err != nil {
		return nil, err
	}
	probe, err := os.CreateTemp(name, "."+OverridesFile+"-*")
	if err != nil {
		return nil, err
	}
	return lock, errors.Join(probe.Close(), os.Remove(probe.Name()))
}

// load reads a file. A file that does not exist has no entries.
func load(name string) ([]Entry, error) {
	data, err := reload.ReadFile(name, maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	entries, err := parse(name, data)
	if err != nil {
		err = fmt.Errorf("%w; restore the file, or remove it to take the overrides of the other members", err)
	}
	return entries, err
}

// parse parses a file, or the book of another member. Its errors begin with name and the place: line and column, or the
// number of the override.
func parse(name string, data []byte) ([]Entry, error) {
	var body fileBody
	if err := json.Unmarshal(data, &body, json.RejectUnknownMembers(true)); err != nil {
		offset := int64(0)
		if syntactic, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
			offset = syntactic.ByteOffset
		} else if semantic, ok := errors.AsType[*json.SemanticError](err); ok {
			offset = semantic.ByteOffset
		}
		line, column := strictyaml.Position(data, int(offset))
		return nil, fmt.Errorf("%s:%d:%d: is not the JSON of overrides: %w", name, line, column, err)
	}
	if body.Format != fileFormat {
		return nil, fmt.Errorf("%s: format: is %d, and this version reads %d", name, body.Format, fileFormat)
	}
	entries, seen := make([]Entry, len(body.Overrides)), make(map[ID]bool, len(body.Overrides))
	var live, size int
	for i, f := range body.Overrides {
		if f.Settings != nil {
			_ = f.Settings.Format() // in the form of Settings; it is valid JSON
		}
		e := Entry{
			ID: ID{f.Policy, f.Key, f.Prefix}, Version: Version{f.Counter, f.Node}, Settings: string(f.Settings),
			By: f.By, At: inMillis(f.At),
		}
		wrong := e.valid()
		switch {
		case wrong != nil:
		case f.Deleted != e.Deleted():
			wrong = errors.New("settings: an override has settings, or is deleted")
		case !e.Deleted() && f.Settings.Kind() != '{':
			wrong = errors.New("settings: are not a JSON object")
		case seen[e.ID]:
			wrong = errors.New("key: is that of another override, too")
		}
		if wrong != nil {
			return nil, fmt.Errorf("%s: overrides[%d]: %w", name, i, wrong)
		}
		if !e.Deleted() {
			live, size = live+1, size+e.bytes()
		}
		if live > 2*MaxOverrides || size > 2*MaxBytes {
			return nil, fmt.Errorf("%s: overrides[%d]: are more than the %d overrides or %d bytes that a node takes",
				name, i, 2*MaxOverrides, 2*MaxBytes)
		}
		entries[i], seen[e.ID] = e, true
	}
	return entries, nil
}

// encode returns the content of a file with these entries.
func encode(entries []*Entry) ([]byte, error) {
	data := fmt.Appendf(nil, "{\"format\": %d, \"overrides\": [\n", fileFormat)
	for i, e := range entries {
		f := fileEntry{Policy: e.Policy, Key: e.Key, Prefix: e.Prefix, Deleted: e.Deleted(), Counter: e.Counter,
			Node: e.Node, By: e.By, At: e.At}
		if !e.Deleted() {
			f.Settings = jsontext.Value(e.Settings)
		}
		line, err := json.Marshal(&f)
		if err != nil {
			return nil, fmt.Errorf("override of policy %q: %w", e.Policy, err)
		}
		data = append(data, line...)
		if i < len(entries)-1 {
			data = append(data, ',')
		}
		data = append(data, '\n')
	}
	return append(data, "]}\n"...), nil
}

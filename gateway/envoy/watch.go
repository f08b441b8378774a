package envoy

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/internal/varint"
)

// Watcher keeps the configuration of a directory up to date.
type Watcher = reload.Watcher[*Config]

// NewWatcher reads the files of a directory (see ReadDir). After Watcher.Watch it reads them again whenever one
// changes, appears or disappears, until Close. A mistake in a file is an error of NewWatcher; later it leaves the whole
// configuration in force as it is. onChange and onError, if not nil, are those of reload.Config.
func NewWatcher(dir string, options Options, onChange func(*Config), onError func(error)) (*Watcher, error) {
	return reload.Open([]string{dir}, reload.Config[*Config]{
		Read: func(name string, _ int64) ([]byte, error) {
			files, err := ReadDir(name)
			return pack(files), err
		},
		Parse: func(contents [][]byte) (*Config, error) { return Parse(unpack(contents[0]), options) },
		// ReadDir bounds the size of the files.
		MaxSize: 2 * strictyaml.MaxFile, OnChange: onChange, OnError: onError,
	})
}

// maxFiles bounds the files of a directory.
const maxFiles = 1000

// ReadDir reads the files of a directory whose names end in .yaml or .yml and do not begin with a dot, sorted by name.
// It skips directories; any other file that is not regular, such as a pipe, is an error. All files together may have at
// most strictyaml.MaxFile bytes.
func ReadDir(dir string) ([]File, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var files []File
	left := int64(strictyaml.MaxFile)
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		if ext := filepath.Ext(name); ext != ".yaml" && ext != ".yml" || strings.HasPrefix(e.Name(), ".") || e.IsDir() {
			continue
		}
		data, err := reload.ReadPrefix(name, left+1)
		switch {
		case errors.Is(err, reload.ErrDirectory):
			continue // a link to a directory
		case err != nil:
			return nil, err
		}
		if left -= int64(len(data)); left < 0 {
			return nil, fmt.Errorf("%s: the files are larger than %d bytes together", dir, strictyaml.MaxFile)
		}
		if len(files) == maxFiles {
			return nil, fmt.Errorf("%s: there are more than %d files", dir, maxFiles)
		}
		files = append(files, File{Name: name, Data: data})
	}
	return files, nil
}

// pack encodes files as the one text that a reload.Watcher compares. unpack is its inverse.
func pack(files []File) []byte {
	out := []byte{1} // never empty: a Watcher takes an empty file for one that is being written
	for _, f := range files {
		out = varint.AppendText(varint.AppendText(out, f.Name), f.Data)
	}
	return out
}

func unpack(packed []byte) (files []File) {
	for r := varint.Of(packed[1:]); len(r.Rest) > 0; {
		files = append(files, File{Name: string(r.Text(math.MaxUint32)), Data: r.Text(math.MaxUint32)})
	}
	return files
}

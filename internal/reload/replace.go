package reload

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
)

// Replacer replaces the whole content of a file, which only its owner may read. Its methods are safe for concurrent
// use.
type Replacer struct {
	Name string

	mu sync.Mutex // held by the one call that writes, even after Replace has returned because of Timeout
}

// Replace writes a new content, and creates the file if it does not exist. If it returns nil, the content is on disk.
// If it fails, the file has this content or the one before, and is whole, even if the machine loses power meanwhile. If
// the file system does not answer within Timeout, Replace fails, and later calls fail at once until the first one ends.
func (r *Replacer) Replace(content []byte) error {
	if !r.mu.TryLock() {
		return &fs.PathError{Op: "write", Path: r.Name, Err: ErrTimeout}
	}
	_, err := within(r.Name, Timeout, func() (struct{}, error) {
		defer r.mu.Unlock()
		return struct{}{}, replace(r.Name, content)
	})
	return err
}

func replace(name string, content []byte) (err error) {
	directory := filepath.Dir(name)
	f, err := os.CreateTemp(directory, "."+filepath.Base(name)+"-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name()) // the error of the caller says more
		}
	}()
	_, err = f.Write(content)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), name); err != nil {
		return err
	}
	// The new name is on disk once the directory is synced.
	d, err := os.Open(directory)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

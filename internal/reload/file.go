package reload

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// Timeout is a default for the time to wait for a small file: a working file system takes less.
const Timeout = 5 * time.Second

// The error of a read that did not end in time wraps ErrTimeout.
var ErrTimeout = errors.New("the file system does not answer")

// The error of a read of something other than a regular file wraps ErrNotRegular.
var ErrNotRegular = errors.New("not a regular file")

// The error of a read of a directory wraps ErrDirectory, which wraps ErrNotRegular.
var ErrDirectory = fmt.Errorf("%w but a directory", ErrNotRegular)

// ReadPrefix returns the first limit bytes of a regular file, or all of a shorter one. It follows symbolic links. It
// rejects anything else, such as a pipe, a device or a directory, without waiting for the process at the other end. It
// returns when the file system answers, which may be never.
func ReadPrefix(name string, limit int64) (content []byte, err error) {
	// With O_NONBLOCK a pipe is opened at once. Without it, the call would wait for a writer.
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		return nil, &fs.PathError{Op: "read", Path: name, Err: ErrDirectory}
	}
	if mode := info.Mode(); !mode.IsRegular() {
		return nil, &fs.PathError{Op: "read", Path: name, Err: fmt.Errorf("%w: its mode is %v", ErrNotRegular, mode)}
	}
	return io.ReadAll(io.LimitReader(f, limit))
}

// ReadFile returns the content of a regular file, as ReadPrefix reads it. It fails if the file has more than limit
// bytes, or cannot be read within Timeout; the read then goes on in its goroutine. It is for programs that read a file
// once, when they start.
func ReadFile(name string, limit int64) ([]byte, error) {
	return within(name, Timeout, func() ([]byte, error) {
		content, err := ReadPrefix(name, limit+1)
		if err == nil && int64(len(content)) > limit {
			err = SizeError(name, limit)
		}
		return content, err
	})
}

// OpenAppend opens a file for appending, and creates it, for its owner alone, if it does not exist. It fails for a pipe
// without a reader, and if the file system does not answer within Timeout. Writes to the file may wait without bound.
func OpenAppend(name string) (*os.File, error) {
	return within(name, Timeout, func() (*os.File, error) {
		return os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_APPEND|syscall.O_NONBLOCK, 0o600)
	})
}

// within calls read, and returns TimeoutError if it does not return within timeout. The call of read then goes on.
func within[T any](name string, timeout time.Duration, read func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1) // so that a late read can end
	go func() {
		value, err := read()
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-time.After(timeout):
		return *new(T), TimeoutError(name, timeout)
	}
}

// TimeoutError returns the error for a file that was not reached in time.
func TimeoutError(name string, after time.Duration) error {
	return &fs.PathError{Op: "reach", Path: name, Err: fmt.Errorf("%w within %v", ErrTimeout, after)}
}

// SizeError returns the error for a file of more than limit bytes.
func SizeError(name string, limit int64) error {
	return &fs.PathError{Op: "read", Path: name, Err: fmt.Errorf("is too large: more than %d bytes", limit)}
}
